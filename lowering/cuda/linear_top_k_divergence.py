"""linear_top_k_divergence: cuBLAS's products between the kernels of cross_entropy."""

from ..linear_top_k_divergence import register
from . import cross_entropy
from .linear_cross_entropy import ALIGNMENT

register("cuda", cross_entropy, ALIGNMENT)
