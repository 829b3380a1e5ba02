"""log_prob: the kernels of cross_entropy."""

from ...common.losses.log_prob import register
from ..tiling import rows
from . import cross_entropy

register("npu", cross_entropy, rows)
