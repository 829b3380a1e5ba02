"""Triton-Ascend kernels for Huawei's NPUs, tiled for the Unified Buffer of a vector core."""

from ... import library

library.import_modules(__name__, __path__)
