"""The device type that scripts use on this machine."""

from __future__ import annotations

import importlib.util

import torch

PREFERENCE = ("cuda", "npu", "xpu")


def infer_device() -> str:
    """Return the first of "cuda", "npu" and "xpu" that PyTorch can use on this machine, or "cpu".

    It is for scripts that choose a device. The ops do not call it: an op runs on its tensors'
    device.
    """
    if importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")
    for device in PREFERENCE:
        module = getattr(torch, device, None)
        if module is not None and module.is_available():
            return device
    return "cpu"
