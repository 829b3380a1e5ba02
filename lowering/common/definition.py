"""Ops that run their definition on a device: PyTorch's functions are what they have there."""

from __future__ import annotations

from typing import Any

import torch

from ... import library


def run_definition(op: str, device: str, module: str) -> None:
    """Register the definitions of `<op>_forward` and `<op>_backward` as a device's kernels."""

    def register(name: str) -> None:
        @torch.no_grad()
        def run(call: Any) -> Any:
            return library.OPS[name].check_and_define(*call)

        library.kernel(name, device, allocates=True, module=module)(run)

    register(f"{op}_forward")
    register(f"{op}_backward")
