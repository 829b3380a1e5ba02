"""Triton-Ascend kernels for Huawei's NPUs, tiled for the Unified Buffer of a vector core."""

from ... import library

library.import_kernels("npu", __name__, __path__)
