"""The losses of a head: aclnn's matrix products between kernels of cross_entropy and divergence."""

from __future__ import annotations

from ....ops.heads.head import scale
from ...common.heads.chunked_head import Device
from ...common.heads.register import register
from ..losses import cross_entropy, divergence

# aclnn would write rows that are not adjacent in memory through a copy: alignment=1.
register("npu", Device(cross_entropy, divergence, scale, alignment=1))
