"""linear_log_prob: cuBLAS's products between the kernels of cross_entropy."""

from ...common.heads.linear_log_prob import register
from ..losses import cross_entropy
from .linear_cross_entropy import ALIGNMENT

register("cuda", cross_entropy, ALIGNMENT)
