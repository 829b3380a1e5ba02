"""What fits a vector core: the Unified Buffer, the cores, the grid, and the tile rules made of them."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

# The runtime refuses a grid of 65536 programs.
MAX_PROGRAMS = 65535

# The interpreter has no driver to ask. The buffer is a 910B core's; the cores are few, so that programs
# walk several tiles, as on a device.
INTERPRETED_UB_BYTES = 196608
INTERPRETED_VECTOR_CORES = 3

# A tile's last axis is padded to this, of which 32 bytes, a block of the Unified Buffer, are a divisor.
MIN_BLOCK_N = 16
MAX_BLOCK_M = 64
