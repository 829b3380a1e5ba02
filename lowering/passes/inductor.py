"""What Inductor should know of the ops before it meets them."""

from __future__ import annotations

import torch

from ...library import OPS

_STRIDES = {
    torch.Tag.needs_contiguous_strides,
    torch.Tag.needs_exact_strides,
    torch.Tag.needs_fixed_stride_order,
}


def declare_ops() -> None:
    """Declare every op to be a call of itself, with the strides that its tag asks for.

    That is what Inductor does at the first call of an op that it does not know. Up to torch 2.12 it
    also writes that call out for its log, with all that the arguments were computed from, once for
    each way that leads there: through the residual sums of 16 layers, 2**32 of them.
    """
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint

    for op in OPS.values():
        if op.overload not in lowerings:
            (tag,) = _STRIDES.intersection(op.overload.tags)
            make_fallback(op.overload, layout_constraint=tag_to_layout_constraint(tag))
