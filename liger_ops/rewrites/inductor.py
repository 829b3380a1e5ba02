"""Register the ops with Inductor before it compiles them."""

from __future__ import annotations

import torch

from ..library import OPS

_STRIDES = {
    torch.Tag.needs_contiguous_strides,
    torch.Tag.needs_exact_strides,
    torch.Tag.needs_fixed_stride_order,
}


def declare_ops() -> None:
    """Register every op as a fallback, with the stride constraint of its tag.

    Inductor does the same at the first call of an unknown op. Up to torch 2.12 it then also logs
    the call with the expressions of all its arguments, expanded once for every path: 2**32 paths
    through the residual sums of 16 layers.
    """
    from ..torch_private import has, inductor_lowering

    if not has("inductor_lowering"):
        return
    for op in OPS.values():
        if op.overload not in inductor_lowering.lowerings:
            (tag,) = _STRIDES.intersection(op.overload.tags)
            constraint = inductor_lowering.tag_to_layout_constraint(tag)
            inductor_lowering.make_fallback(op.overload, layout_constraint=constraint)
