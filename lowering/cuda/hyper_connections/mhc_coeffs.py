"""mhc_coeffs: cuBLAS's products between kernels."""

from ....ops.hyper_connections.mhc_coeffs import MOST_STREAMS
from ...common.hyper_connections.mhc_coeffs import register
from . import mhc_coeffs_kernels

register("cuda", mhc_coeffs_kernels, MOST_STREAMS)
