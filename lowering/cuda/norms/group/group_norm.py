"""group_norm."""

from __future__ import annotations

from torch import Tensor

from ..... import library
from ....common.tensors import contiguous
from ...partial_sums import partial_sums, summed
from .group_cached import Walk, launch_walk, plan_walk
from .group_pieces import Pieces, launch_channel_gradients, launch_pieces, plan_pieces
from .group_plan import GroupedShape
from .group_whole import WholeGroup, launch_whole_group, plan_whole_group


def plan_group(x: Tensor, shape: GroupedShape, backward: bool) -> WholeGroup | Walk | Pieces:
    """Plan whole groups if they fit in registers, else a walk if the cache holds them, else
    pieces."""
    return (
        plan_whole_group(shape, backward)
        or plan_walk(x, shape, backward)
        or plan_pieces(x, shape, backward)
    )


@library.kernel("group_norm", "cuda")
def group_norm(call, y, plan):
    x, weight, bias = map(contiguous, (call.x, call.weight, call.bias))
    shape = GroupedShape.of(x, call.num_groups)
    plan = plan or plan_group(x, shape, False)
    if isinstance(plan, Pieces):
        launch_pieces(plan, shape, None, x, weight, bias, y, call.eps)
        return
    arguments = (x, weight, bias, y, *shape.arguments, call.eps)
    options = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
    launch_group = launch_whole_group if isinstance(plan, WholeGroup) else launch_walk
    launch_group(plan, shape, x, False, *arguments, **options)


@library.kernel("group_norm_backward", "cuda")
def group_norm_backward(call, dx, dweight, dbias, plan):
    x, dy, weight = map(contiguous, (call.x, call.dy, call.weight))
    shape = GroupedShape.of(x, call.num_groups)
    plan = plan or plan_group(x, shape, True)
    if isinstance(plan, Pieces):
        moments = launch_pieces(plan, shape, dy, x, weight, None, dx, call.eps)
        launch_channel_gradients(moments, dweight, dbias, shape)
        return
    dweights = partial_sums(dweight, x.shape[0])
    dbiases = partial_sums(dbias, x.shape[0])
    arguments = (dy, x, weight, dx, dweights, dbiases, *shape.arguments, call.eps)
    options = {
        "HAS_WEIGHT": weight is not None,
        "NEEDS_DX": dx is not None,
        "NEEDS_DWEIGHT": dweight is not None,
        "NEEDS_DBIAS": dbias is not None,
    }
    launch_group = launch_whole_group if isinstance(plan, WholeGroup) else launch_walk
    launch_group(plan, shape, x, True, *arguments, **options)
    summed((dweights, dweight), (dbiases, dbias))
