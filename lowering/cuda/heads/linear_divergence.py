"""linear_divergence: cuBLAS's products between the kernels of divergence and cross_entropy."""

from ...common.heads.linear_divergence import register
from ..losses import cross_entropy, divergence
from .linear_cross_entropy import ALIGNMENT, scale

register("cuda", divergence, cross_entropy, scale, ALIGNMENT)
