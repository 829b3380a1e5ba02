"""log_prob: the kernels of cross_entropy."""

from ...common.losses.log_prob import register
from ..launch import rows
from . import cross_entropy

register("cuda", cross_entropy, rows)
