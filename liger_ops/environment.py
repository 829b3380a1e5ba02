"""A description of the machine for bug reports: versions, devices, and each op's implementation."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from . import __version__, library
from .compile_cache import package_hash
from .device import PREFERENCE, infer_device

# The distribution that has the package `triton`.
TRITON = "triton-windows" if sys.platform == "win32" else "triton"
PACKAGES = (
    "torch", TRITON, "torch_npu", "triton-ascend", "nvidia-cudnn-frontend", "transformers",
)  # fmt: skip


def describe() -> dict[str, Any]:
    """Describe the environment in JSON types.

    `versions`: the version of each package, or None if it is not installed. `liger_ops`: version,
    folder and a hash of the sources. `devices`: device type -> the devices of that type that
    PyTorch can use. `kernels`: device type -> the ops whose kernels for it import, even if this
    machine has no such device. `without_kernels`: device type -> why no kernel imports. `ops`: op
    -> device type of this machine -> the implementation.
    """
    # This comes first: it imports torch_npu, if installed, which defines torch.npu.
    best, problem = _best_device()
    devices = {"cpu": [_cpu()]}
    for device_type in PREFERENCE:
        accelerators = _accelerators(device_type)
        if accelerators:
            devices[device_type] = accelerators
    kernels, without = _kernels()
    return {
        "liger_ops": {
            "version": __version__,
            "sources": package_hash(),
            "folder": str(Path(__file__).parent),
        },
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
        },
        "platform": platform.platform(),
        "cuda_of_torch": torch.version.cuda,
        "hip_of_torch": torch.version.hip,
        "devices": devices,
        "best_device": best,
        "problem": problem,
        "kernels": kernels,
        "without_kernels": without,
        "ops": {
            name: {
                device: library.implementation(op, device)
                if name in kernels.get(device, ())
                else "no kernel imports"
                if device in op.kernels
                else "definition"
                for device in devices
            }
            for name, op in library.OPS.items()
        },
    }


def _kernels() -> tuple[dict[str, list[str]], dict[str, str]]:
    """Import the kernels of every device. Return the ops that have one, and why others have none,
    by device type."""
    kernels: dict[str, list[str]] = {}
    without: dict[str, str] = {}
    for device in library.DEVICES:
        kernels[device] = []
        try:
            library.load(device)
        except ImportError as error:
            without[device] = str(error).partition("failed: ")[2] or str(error)
            continue
        kernels[device] = [
            name
            for name, op in library.OPS.items()
            # Until a kernel is installed, the op's function there is one of `library`.
            if device in op.kernels and op.kernels[device].__module__ != library.__name__
        ]
        if not kernels[device]:
            without[device] = _unregistered(device)
    return kernels, without


def _unregistered(device: str) -> str:
    """Return why `lowering` has registered no kernel of a device."""
    if device == "npu":
        found = {"torch_npu": find_spec("torch_npu"), "triton-ascend": _version("triton-ascend")}
        return f"not installed: {', '.join(name for name in found if found[name] is None)}"
    is_ascend = _version("triton-ascend") is not None
    return "triton-ascend is installed in place of triton" if is_ascend else f"{TRITON} is missing"


def _best_device() -> tuple[str, str | None]:
    try:
        return infer_device(), None
    except Exception as error:
        # If a vendor's package fails to import, the report has to show that.
        return "unknown", f"{type(error).__name__}: {error}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> dict[str, str | None]:
    return {"name": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()}


def _accelerators(device_type: str) -> list[dict[str, str | None]]:
    module: Any = getattr(torch, device_type, None)
    if module is None or not module.is_available():
        return []
    # CUDA's and XPU's modules are PyTorch's own; a vendor's module may lack these functions.
    name = getattr(module, "get_device_name", lambda index: device_type)
    capability = getattr(module, "get_device_capability", lambda index: None)
    return [
        {"name": name(index), "capability": _dotted(capability(index))}
        for index in range(module.device_count())
    ]


def _dotted(capability: Any) -> str | None:
    # CUDA's capability is a pair. XPU's is a dictionary of all properties, too long to print.
    return ".".join(map(str, capability)) if isinstance(capability, tuple) else None
