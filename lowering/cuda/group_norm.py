"""group_norm."""

from __future__ import annotations

from torch import Tensor

from ... import library, meta
from .group_pieces import Pieces, launch_channel_gradients, launch_pieces, plan_pieces
from .group_plan import GroupPlan, Groups
from .group_walk import Walk, launch_walk, plan_walk
from .group_whole import WholeGroup, launch_whole_group, plan_whole_group
from .partial_sums import partial_sums, summed


def plan_group(x: Tensor, shape: Groups, backward: bool) -> WholeGroup | Walk | Pieces:
    return (
        plan_whole_group(shape, backward)
        or plan_walk(x, shape, backward)
        or plan_pieces(x, shape, backward)
    )


@library.kernel("group_norm", "cuda")
def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    plan: GroupPlan | None = None,
) -> Tensor:
    y = meta.group_norm.group_norm(x, num_groups, weight, bias, eps)
    if x.numel() == 0:
        return y
    x = x.contiguous()
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    shape = Groups.of(x, num_groups)
    plan = plan or plan_group(x, shape, False)
    if isinstance(plan, Pieces):
        launch_pieces(plan, shape, None, x, weight, bias, y, eps)
        return y
    arguments = (x, weight, bias, y, *shape.arguments, eps)
    options = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
    launch_group = launch_whole_group if isinstance(plan, WholeGroup) else launch_walk
    launch_group(plan, shape, x, False, *arguments, **options)
    return y


@library.kernel("group_norm_backward", "cuda")
def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    output_mask: list[bool],
    *,
    plan: GroupPlan | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx, dweight, dbias = gradients = meta.group_norm.group_norm_backward(
        dy, x, num_groups, weight, bias, eps, output_mask
    )
    if x.numel() == 0 or gradients == (None, None, None):
        for sums in (dweight, dbias):
            if sums is not None:
                sums.zero_()
        return gradients
    x, dy = x.contiguous(), dy.contiguous()
    weight = None if weight is None else weight.contiguous()
    shape = Groups.of(x, num_groups)
    plan = plan or plan_group(x, shape, True)
    if isinstance(plan, Pieces):
        moments = launch_pieces(plan, shape, dy, x, weight, None, dx, eps)
        launch_channel_gradients(moments, dweight, dbias, shape)
        return gradients
    dweights = partial_sums(dweight, x.shape[0])
    dbiases = partial_sums(dbias, x.shape[0])
    arguments = (dy, x, weight, dx, dweights, dbiases, *shape.arguments, eps)
    options = {
        "HAS_WEIGHT": weight is not None,
        "NEEDS_DX": dx is not None,
        "NEEDS_DWEIGHT": dweight is not None,
        "NEEDS_DBIAS": dbias is not None,
    }
    launch_group = launch_whole_group if isinstance(plan, WholeGroup) else launch_walk
    launch_group(plan, shape, x, True, *arguments, **options)
    summed((dweights, dweight), (dbiases, dbias))
    return gradients
