"""Run an op's definition in place of a device's kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import library


def run_definition(op: str, device: str, module: str) -> None:
    """Register the definitions of `<op>_forward` and `<op>_backward` as a device's kernels, for an
    op that has no kernels but PyTorch's."""

    def register(name: str) -> None:
        @torch.no_grad()
        def run(call: Any) -> Any:
            return library.OPS[name].check_and_define(*call)

        library.kernel(name, device, allocates=True, module=module)(run)

    register(f"{op}_forward")
    register(f"{op}_backward")


def fill_by_definition(op: str, call: Any, outputs: Sequence[Tensor | None]) -> None:
    """Fill the outputs of a call with what the op's definition returns."""
    for output, result in zip(outputs, library.OPS[op].definition(*call), strict=True):
        if output is not None and result is not None:
            output.copy_(result)
