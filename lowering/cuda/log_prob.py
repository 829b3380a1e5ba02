"""log_prob: the kernels of cross_entropy."""

from ..log_prob import register
from . import cross_entropy
from .launch import rows

register("cuda", cross_entropy, rows)
