"""tiled_mlp on a device: PyTorch's matrix products, a tile of tokens at a time, and between them
the kernels of the device's gated activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .... import library
from ....ops.activations.tiled_mlp import ACTIVATIONS, tiles_of
from ..products import linear, product


def register(device: str, module: str) -> None:
    """Register tiled_mlp as a kernel of the device; `module` is the device's module of the op."""

    @library.kernel("tiled_mlp_forward", device, module=module)
    def tiled_mlp_forward(call, y, plan):
        rows, out = _rows(call.x), y.view(-1, y.shape[-1])
        gated, options = _activation(call, device)
        for tile in tiles_of(rows, call.gate_weight, call.tile_rows):
            gate, up = _gate_and_up(call, rows[tile])
            linear(gated(gate, up, *options), call.down_weight, call.down_bias, out[tile])

    # allocates=True, so that the outputs are not in memory beside their wider sums.
    @library.kernel("tiled_mlp_backward", device, allocates=True, module=module)
    def tiled_mlp_backward(call):
        return _backward(call, device)


def _backward(call: Any, device: str) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x and of the weights and biases, a tile of tokens at a time.

    The lists number them: gate_weight 0, up_weight 1, down_weight 2, and their biases 3, 4 and 5.
    """
    dx, *outputs = library.allocate("tiled_mlp_backward", call)
    specs = [None if output is None else (output.shape, output.dtype) for output in outputs]
    del outputs
    rows, upstream = _rows(call.x), _rows(call.dy)
    drows = None if dx is None else dx.view(rows.shape)
    gated, options = _activation(call, device)
    gated_backward, _ = _activation(call, device, "_backward")
    tiles = list(tiles_of(rows, call.gate_weight, call.tile_rows))
    sums = [_Sum(spec, len(tiles), rows) for spec in specs]
    through_activation = dx is not None or any(specs[i] is not None for i in (0, 1, 3, 4))
    for tile in tiles:
        x, dy = rows[tile], upstream[tile]
        gate = up = None
        if through_activation or specs[2] is not None:
            gate, up = _gate_and_up(call, x)
        if specs[2] is not None:
            sums[2].add_product(dy, gated(gate, up, *options))
        sums[5].add_rows(dy)
        if not through_activation:
            continue
        dh = torch.mm(dy, call.down_weight)
        dgate, dup = gated_backward(dh, gate, up, *options, [True, True])
        del dh, gate, up
        if drows is not None:
            torch.mm(dgate, call.gate_weight, out=drows[tile])
            drows[tile].addmm_(dup, call.up_weight)
        for i, gradient in ((0, dgate), (1, dup)):
            sums[i].add_product(gradient, x)
            sums[3 + i].add_rows(gradient)
    return (dx, *(total.rounded() for total in sums))


class _Sum:
    """The gradient of a weight or a bias: a sum over the tiles, in float32, that is rounded once.

    The product of a single tile in bfloat16 is rounded by PyTorch's product, and needs no float32.
    In float16, the product could overflow. Without a `spec`, (shape, dtype), the gradient is not
    wanted.
    """

    def __init__(
        self, spec: tuple[torch.Size, torch.dtype] | None, tiles: int, rows: Tensor
    ) -> None:
        self.total: Tensor | None = None
        self.spec = spec
        if spec is not None:
            shape, self.dtype = spec
            is_single = tiles == 1 and self.dtype is torch.bfloat16 and len(shape) == 2
            self.total = rows.new_zeros(shape, dtype=self.dtype if is_single else torch.float32)

    def add_product(self, outer: Tensor, inner: Tensor) -> None:
        """Add outer.T @ inner."""
        if self.total is not None:
            product(outer.t(), inner, self.total.dtype, self.total, add=True)

    def add_rows(self, values: Tensor) -> None:
        if self.total is not None:
            self.total += values.sum(0, dtype=torch.float32)

    def rounded(self) -> Tensor | None:
        return None if self.total is None else self.total.to(self.dtype)


def _activation(call: Any, device: str, suffix: str = "") -> tuple[Callable[..., Any], Any]:
    op, options = ACTIVATIONS[call.activation]
    return library.OPS[op + suffix].kernels[device], options


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def _gate_and_up(call: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = (x.new_empty(x.shape[0], call.gate_weight.shape[0]) for _ in range(2))
    linear(x, call.gate_weight, call.gate_bias, gate)
    linear(x, call.up_weight, call.up_bias, up)
    return gate, up
