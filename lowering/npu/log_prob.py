"""log_prob: the kernels of cross_entropy."""

from ..log_prob import register
from . import cross_entropy
from .tiling import rows

register("npu", cross_entropy, rows)
