"""The cure for an error of the NPU's packages, in one sentence: known causes by their messages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ENVIRONMENT_FILES = (
    "cann/set_env.sh",
    "ascend-toolkit/set_env.sh",
    "cann/latest/set_env.sh",
    "nnae/set_env.sh",
)
ROOTS = ("/usr/local/Ascend", "~/Ascend")


def set_env() -> str:
    """Return the cure for libraries or settings of CANN that are missing."""
    files = (Path(root).expanduser() / file for root in ROOTS for file in ENVIRONMENT_FILES)
    found = next((str(file) for file in files if file.is_file()), None)
    if found:
        return f"Run `source {found}` in this shell, which sets CANN's paths."
    return (
        f"Run `source {ROOTS[0]}/{ENVIRONMENT_FILES[0]}` in this shell, which sets CANN's paths, or"
        " the set_env.sh of the folder that CANN is installed in; install CANN if there is none."
    )


def driver() -> str:
    return (
        "Install the NPU's driver, or mount /usr/local/Ascend/driver into the container, and add"
        " its folder lib64/driver to LD_LIBRARY_PATH; `npu-smi info` must list the device."
    )


def device() -> str:
    return (
        "`npu-smi info` must list the device: check the driver, the devices /dev/davinci* of the"
        " container, and ASCEND_RT_VISIBLE_DEVICES"
        f" (now {os.environ.get('ASCEND_RT_VISIBLE_DEVICES', 'not set')})."
    )


def pybind11() -> str:
    return "Run `pip install pybind11`: triton-ascend imports it and does not install it."


def one_triton() -> str:
    return (
        "Run `pip uninstall -y triton triton-ascend`, then `pip install --no-deps triton-ascend`:"
        " both are the package `triton`, and overwrite each other."
    )


def pair(torch: str = "") -> str:
    """Return the cure for a torch_npu that is not the one for torch, whose version may be given."""
    wanted = f"`pip install 'torch_npu=={minor(torch)}.*'`" if minor(torch) else "the one for torch"
    return f"Install {wanted}: the first two numbers of torch_npu's version must be torch's."


def cpu_torch() -> str:
    return f"Install a torch for the CPU, with `pip install torch --index-url {CPU_INDEX}`."


def standard() -> str:
    return (
        "Install torch 2.13 with torch_npu 2.13, or a triton-ascend that compiles its launcher as"
        " C++20: this one's launcher includes headers of torch that need it."
    )


def compiler() -> str:
    return "Install g++ or clang++ (`apt-get install g++`), or name a C++ compiler with CC."


def bishengir() -> str:
    return f"bishengir-compile comes with CANN. {set_env()}"


def minor(version: str) -> str:
    """Return the first two numbers of a version: 2.13 of 2.13.0.post4 and of 2.13.0+cpu."""
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else ""


# The first pattern that an error's text contains gives the cure.
CURES: tuple[tuple[str, Callable[[], str]], ...] = (
    ("undefined symbol", pair),
    (r"\blib(ascend_hal|drv\w*|dcmi)\.so", driver),
    (r"\blib\w+\.so[\d.]*: (cannot open|not found)", set_env),
    (r"ASCEND_HOME_PATH|ASCEND_OPP_PATH|No module named '(acl|tbe|te)\b", set_env),
    ("No module named 'pybind11'", pybind11),
    (r"from 'triton\b|odule (named )?'triton\b|the backends of triton", one_triton),
    ("Two accelerators cannot be used", cpu_torch),
    (r"C\+\+20 or later", standard),
    (r"Failed to find C\+\+ compiler", compiler),
    ("bishengir-compile", bishengir),
    (r"No NPUs? (is|are) available|drvGetDevNum|aclrtSetDevice|Get device count", device),
)


def cure_of(text: str) -> str:
    """Return the cure for an error with this text, or "" if its cause is not known."""
    for pattern, cure in CURES:
        if re.search(pattern, text):
            return cure()
    missing = re.search(r"No module named '([\w-]+)", text)
    return f"Run `pip install {missing[1]}`." if missing else ""


def explained(error: BaseException) -> str:
    """Return an error and its cure in one line. PyTorch's error for a package that it could not
    load itself stands for that package's own."""
    if "Failed to load the backend extension" in str(error) and error.__cause__ is not None:
        error = error.__cause__
    return with_cure(f"{type(error).__name__}: {error}")


def with_cure(text: str) -> str:
    """Return the first line of an error's text, with the cure if its cause is known."""
    line, cure = text.strip().partition("\n")[0], cure_of(text)
    return f"{line.rstrip('. ')}. {cure}" if cure else line
