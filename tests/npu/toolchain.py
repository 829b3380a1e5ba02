"""The tools that `setup` installs: their paths, what is missing, and a cache of their results."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_USER_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
CACHE = Path(os.environ.get("LIGER_OPS_NPU_CACHE") or _USER_CACHE / "liger_ops" / "npu")

# Version of ascendnpu-ir -> the CANN that ships the same compiler.
COMPILERS = {"1.0.0": "CANN 8.5.0", "1.1.0": "CANN 9.0.0", "1.2.0": "CANN 9.1.0"}
CPU_TOOLS = ("mlir-opt-19", "mlir-translate-19", "clang-19")

# A 910B4, the smallest of the 910B: its vector cores, and the Unified Buffer of each.
ARCH = "Ascend910B4"
VECTOR_CORES = 40
UB_BYTES = 196608
# Other chips: their vector cores and Unified Buffer, by the head of code that is compiled for them.
# Those of Atlas A3, and of the Ascend 950.
OTHER_CHIPS = {"Ascend910_9391": (48, 196608), "Ascend950PR_9579": (56, 253952)}


def compiler(version: str, chip: str = ARCH) -> Path:
    """Return the path of a version's compiler for a chip, which does not exist for some."""
    name = "bishengir-compile-a5" if chip.startswith("Ascend950") else "bishengir-compile"
    return CACHE / "npuir" / version / "bin" / name


def missing_compiler(version: str) -> str:
    """Return the reason why this version's compiler is missing, or an empty string."""
    exists = (CACHE / "npuir" / version / "ready").exists()
    return "" if exists else f"ascendnpu-ir {version} could not be had: see tests/npu/setup"


def missing_cpu_tools() -> str:
    """Return the reason why lowered code cannot run here, or an empty string."""
    missing = [tool for tool in CPU_TOOLS if shutil.which(tool) is None]
    return f"{', '.join(missing)} could not be had: see tests/npu/setup" if missing else ""


def file_for(kind: str, key: str, suffix: str) -> Path:
    """Return the path in the cache for `key`, a text that names all that the result depends on."""
    folder = CACHE / "results" / kind
    folder.mkdir(parents=True, exist_ok=True)
    return folder / (hashlib.sha256(key.encode()).hexdigest()[:32] + suffix)


def write(path: Path, data: bytes) -> None:
    """Write a file atomically: no other process sees a part of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


def cached(kind: str, key: str, compute: Callable[[], Any]) -> Any:
    """Return the result of `compute`, which JSON can hold, from the cache if it is there."""
    path = file_for(kind, key, ".json.gz")
    if path.exists():
        path.touch()
        return json.loads(gzip.decompress(path.read_bytes()))
    value = compute()
    write(path, gzip.compress(json.dumps(value).encode(), 3))
    return value
