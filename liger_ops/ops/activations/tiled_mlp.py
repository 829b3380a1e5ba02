"""A gated MLP that holds the intermediates of one tile of tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import library
from ...accepted import AT_LEAST_1
from ..heads.head import TILE, cast_as_linear, chunks
from ..tensors import widened

# Activation -> the op that computes activation(gate) * up, and the op's options.
ACTIVATIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "silu": ("swiglu", (1.0, 1.0)),
    "gelu_tanh": ("geglu", ("tanh",)),
    "gelu": ("geglu", ("none",)),
}
# The default size of a tile's gate. It is not timed. Products of fewer than some thousand rows are
# slower.
DEFAULT_BYTES = 128 * 2**20

# Devices may shard I, the columns of the intermediates ("i"), and sum their y. With a down_bias
# they may not ("I"): each device would add the bias.
AXES = (
    "x=* D, gate_weight=i D, up_weight=i D, down_weight=o i, gate_bias=i, up_bias=i -> y=* o |"
    "x=* D, gate_weight=I D, up_weight=I D, down_weight=o I, gate_bias=I, up_bias=I, down_bias=o"
    "-> y=* o"
)


@library.compose
def tiled_mlp(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
    gate_bias: Tensor | None = None, up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu", tile_rows: int | None = None,
) -> Tensor:  # fmt: skip
    """Apply a gated MLP, a tile of tokens at a time.

        h = activation(x @ gate_weight.T + gate_bias) * (x @ up_weight.T + up_bias)
        y = h @ down_weight.T + down_bias

    The intermediates of one tile are in memory at a time, and none is kept: the backward computes
    gate and up again from x, which takes two products beside the nine of a forward and backward.
    Products are PyTorch's, in the dtype of the inputs; gate and up are rounded to it, as by
    `torch.nn.functional.linear`, and h is computed from them by `swiglu` or `geglu`.

    The gradients of the weights and biases are summed over the tiles in float32, and rounded once.
    On a device whose products cannot return float32 for bfloat16 (Ascend NPUs, CPUs), each tile's
    product is rounded to bfloat16 before it is added. If there is one tile, there is no sum. A
    gradient that is not required is neither computed nor allocated.

    Memory, beside y and the gradients: four intermediates of a tile, tile_rows x I each, in the
    backward, and the float32 sums of the weights' gradients, if there are several tiles. Under
    autocast, inputs are cast as those of a linear layer are.

    Args:
        x: (..., D), floating point.
        gate_weight, up_weight: (I, D), of x's dtype.
        down_weight: (O, I), of x's dtype.
        gate_bias, up_bias, down_bias: (I,), (I,) and (O,), of x's dtype; each may be None.
        activation: "silu"; "gelu", with erf; or "gelu_tanh", its approximation.
        tile_rows: the most tokens in a tile; by default, as many as make a gate of 128 MiB, and at
            least 128. Tiles have similar sizes, which are multiples of 128 if tile_rows is at least
            128.

    Returns:
        (..., O), contiguous, of x's dtype.

    Raises:
        TypeError: a tensor is not floating point.
        ValueError: the shapes do not fit together, a tensor does not have x's dtype, the devices
            differ, activation is unknown, or tile_rows is below 1.

    Source: "Arctic Long Sequence Training", 2025 (tiled MLP).

    Example:
        >>> x, weight = torch.ones(3, 2), torch.ones(4, 2)
        >>> liger_ops.tiled_mlp(x, weight, weight, weight.T, tile_rows=2)
        tensor([[14.0928, 14.0928],
                [14.0928, 14.0928],
                [14.0928, 14.0928]])
    """
    x, gate_weight, gate_bias = cast_as_linear(x, gate_weight, gate_bias)
    _, up_weight, up_bias = cast_as_linear(x, up_weight, up_bias)
    _, down_weight, down_bias = cast_as_linear(x, down_weight, down_bias)
    weights, biases = (gate_weight, up_weight, down_weight), (gate_bias, up_bias, down_bias)
    return tiled_mlp_forward(x, *weights, *biases, activation, tile_rows)


@library.forward(
    "...", axes=AXES, options={"activation": tuple(ACTIVATIONS), "tile_rows": AT_LEAST_1}
)
def tiled_mlp_forward(call: Any) -> Tensor:
    """Compute `tiled_mlp` in the dtypes of its inputs, under autocast too.

    Returns:
        (..., O), contiguous, of x's dtype.

    Raises:
        TypeError, ValueError: as `tiled_mlp`.

    Example:
        >>> x, weight = torch.ones(1, 2), torch.ones(4, 2)
        >>> liger_ops.tiled_mlp_forward(x, weight, weight, weight.T)
        tensor([[14.0928, 14.0928]])
    """
    op, options = ACTIVATIONS[call.activation]
    gated = library.OPS[op].definition
    rows = call.x.reshape(-1, call.x.shape[-1])
    tiles = []
    for tile in tiles_of(rows, call.gate_weight, call.tile_rows):
        gate = F.linear(rows[tile], call.gate_weight, call.gate_bias)
        up = F.linear(rows[tile], call.up_weight, call.up_bias)
        tiles.append(F.linear(gated(gate, up, *options), call.down_weight, call.down_bias))
    return torch.cat(tiles).reshape(*call.x.shape[:-1], call.down_weight.shape[0])


@library.backward(
    "tiled_mlp_forward",
    "dy x gate_weight up_weight down_weight gate_bias up_bias down_bias ... output_mask ->"
    " dx dgate_weight dup_weight ddown_weight dgate_bias dup_bias ddown_bias",
)
def tiled_mlp_backward(call: Any) -> Any:
    """Compute the gradient of `tiled_mlp` from x: gate and up again, a tile at a time."""
    op, options = ACTIVATIONS[call.activation]
    gated, gated_backward = (library.OPS[n].definition for n in (op, f"{op}_backward"))
    rows, upstream = (t.reshape(-1, t.shape[-1]) for t in (call.x, call.dy))
    of_x, *others = call.output_mask
    of_weights, of_biases = others[:3], others[3:]
    call_biases = (call.gate_bias, call.up_bias, call.down_bias)
    drows: list[Tensor] = []
    # Sums over the tiles: the gradients of the weights of gate, up and down, then of their biases.
    weights: list[Tensor | None] = [None] * 3
    biases: list[Tensor | None] = [None] * 3
    for tile in tiles_of(rows, call.gate_weight, call.tile_rows):
        gate = F.linear(rows[tile], call.gate_weight, call.gate_bias)
        up = F.linear(rows[tile], call.up_weight, call.up_bias)
        dh = upstream[tile] @ call.down_weight
        dgate, dup = gated_backward(dh, gate, up, *options, [True, True])
        if of_x:
            drows.append(torch.addmm(dgate @ call.gate_weight, dup, call.up_weight))
        inputs = (rows[tile], rows[tile], gated(gate, up, *options))
        for i, (outer, inner) in enumerate(zip((dgate, dup, upstream[tile]), inputs, strict=True)):
            if of_weights[i]:
                weights[i] = _sum(weights[i], widened(outer).t() @ widened(inner))
            if of_biases[i] and call_biases[i] is not None:
                biases[i] = _sum(biases[i], widened(outer).sum(0))
    dx = torch.cat(drows).reshape(call.x.shape) if of_x else None
    sums = [None if total is None else total.to(call.x.dtype) for total in (*weights, *biases)]
    return (dx, *sums)


def tiles_of(rows: Tensor, gate_weight: Tensor, tile_rows: int | None) -> Iterator[slice]:
    """Yield the tiles of tokens as slices of rows."""
    row_bytes = max(1, gate_weight.shape[0] * rows.element_size())
    if tile_rows is None:
        tile_rows = max(TILE, DEFAULT_BYTES // row_bytes)
    return chunks(rows.shape[0], row_bytes, tile_rows * row_bytes)


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part


library.keep_dtypes_under_autocast("tiled_mlp_forward", "tiled_mlp_backward")
