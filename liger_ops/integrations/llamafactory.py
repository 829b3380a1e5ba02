"""`fuse` as a kernel of LLaMA-Factory v1, by the name "liger_ops"."""

from __future__ import annotations

import importlib
from typing import Any

from ..fusion import fuse

NAME = "liger_ops"
KERNELS = "llamafactory.v1.plugins.model_plugins.kernels"


def install() -> None:
    """Register the kernel "liger_ops" with LLaMA-Factory, for this process.

    The kernel calls `liger_ops.fuse` on the model. Name it in the configuration:

        kernel_config:
          name: auto
          include_kernels: liger_ops

    The value "auto" of include_kernels, and `use_v1_kernels: true` of LLaMA-Factory v0, apply every
    kernel that is registered for the device, and "liger_ops" with them. The losses of LLaMA-Factory
    v1 weight the tokens and are computed from logits, so `fuse` does not replace them.

    `uninstall` undoes it. A second call does nothing more.

    Raises:
        ImportError: LLaMA-Factory is not installed, or has no kernels of v1.

    Example:
        >>> from liger_ops.integrations import llamafactory
        >>> llamafactory.install()  # doctest: +SKIP
    """
    registry = importlib.import_module(f"{KERNELS}.registry")
    if registry.Registry.get(NAME) is not None:
        return
    base = importlib.import_module(f"{KERNELS}.base")
    # LLaMA-Factory does not register a kernel without the device of this process.
    devices = list(importlib.import_module("llamafactory.v1.accelerator.helper").DeviceType)
    fields = {"_kernel_id": NAME, "_device": devices, "apply": classmethod(_apply)}
    registry.register_kernel(type("LigerOpsKernel", (base.BaseKernel,), fields))


def uninstall() -> None:
    """Remove "liger_ops" from LLaMA-Factory's registry."""
    registry = importlib.import_module(f"{KERNELS}.registry")
    registry.Registry.get_registered_kernels().pop(NAME, None)


def _apply(cls: Any, /, *, model: Any, **unused: Any) -> Any:
    """Fuse the model, and return it."""
    fuse(model)
    return model
