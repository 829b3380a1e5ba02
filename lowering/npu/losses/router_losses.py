"""router_losses, whose definition runs: PyTorch's softmax, sort and sums of torch_npu."""

from __future__ import annotations

from typing import Any

from .... import library


@library.kernel("router_losses_forward", "npu", allocates=True)
def forward(call: Any) -> Any:
    return library.OPS["router_losses_forward"].definition(*call)


@library.kernel("router_losses_backward", "npu", allocates=True)
def backward(call: Any) -> Any:
    return library.OPS["router_losses_backward"].definition(*call)
