"""Triton kernels for GPUs. PyTorch's device type is "cuda" for AMD's too, for which they have been
compiled, but never run."""

from ... import library
from .replay import Replays

library.import_kernels("cuda", __name__, __path__, Replays)
