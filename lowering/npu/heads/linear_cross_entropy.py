"""linear_cross_entropy: aclnn's matrix products between the kernels of cross_entropy."""

from __future__ import annotations

from ....ops.heads.scaling import scale
from ...common.heads.linear_cross_entropy import register
from ..losses import cross_entropy

# aclnn would write rows that are not adjacent in memory through a copy.
ALIGNMENT = 1


register("npu", cross_entropy, scale, ALIGNMENT)
