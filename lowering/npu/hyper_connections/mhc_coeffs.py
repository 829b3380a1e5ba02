"""mhc_coeffs: aclnn's products between kernels."""

from ...common.hyper_connections.mhc_coeffs import register
from . import mhc_coeffs_kernels

# The matrices of 16 streams and 8 tokens take 196% of the Unified Buffer in the backward.
MOST_STREAMS = 8

register("npu", mhc_coeffs_kernels, MOST_STREAMS)
