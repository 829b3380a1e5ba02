"""linear_divergence: aclnn's products between the kernels of divergence and cross_entropy."""

from ....ops.heads.scaling import scale
from ...common.heads.linear_divergence import register
from ..losses import cross_entropy, divergence
from .linear_cross_entropy import ALIGNMENT

register("npu", divergence, cross_entropy, scale, ALIGNMENT)
