"""Norms with a modulation, y * (1 + scale) + shift: shared parts of their kernels and host code."""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from ...common.norms.modulation import Modulation
from ...common.norms.norm_math import modulated
from ..tiling import COSTS, Cost, Plan

# whole (1, 4096): 83.4% | 79.2%. wide (1, 2048): 77.2% | 52.2%.
COSTS["modulated_rms_norm"] = Cost({2: 43.1, 4: 43.1}, {2: 86.2, 4: 86.2})
# whole (1, 4096): 100.0% | 91.8%. wide (1, 2048): 93.9% | 85.6%.
COSTS["modulated_layer_norm"] = Cost({2: 48.1, 4: 48.1}, {2: 90.3, 4: 90.3})
# whole (1, 2048): 62.6%, (1, 4096): 95.9%. wide, the statistics, (1, 2048): 54.3%.
COSTS["modulated_rms_norm_backward"] = Cost({2: 46.1, 4: 46.1}, {2: 86.2, 4: 86.2})
# whole (1, 2048): 75.1% | 71.0%. wide, the statistics, (1, 2048): 94.0%, (1, 1024): 51.3%.
COSTS["modulated_layer_norm_backward"] = Cost({2: 86.2, 4: 86.2}, {2: 98.4, 4: 98.4})
# With a modulation of each row: the statistics kernel then runs for rows of any width.
COSTS["modulated_rms_norm_statistics"] = Cost({}, {2: 86.2, 4: 86.2})
COSTS["modulated_layer_norm_statistics"] = Cost({}, {2: 98.4, 4: 98.4})
# (1, 2048): 79.3% | 75.2%.
COSTS["modulated_columns"] = Cost({}, {2: 86.2, 4: 86.2})


@triton.jit
def modulated_tile(
    y, scale_ptr, shift_ptr, offsets, mask,
    dtype: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Return y * (1 + scale) + shift; `offsets` are those of a tile or a row of scale and shift."""
    scale = tl.load(scale_ptr + offsets, mask=mask, other=0.0)
    shift = None
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + offsets, mask=mask, other=0.0)
    return modulated(y, scale, shift, dtype, ROUNDS)


def plan_modulation(plan: Plan, x: Tensor, modulation: Modulation) -> tuple[Plan, bool]:
    """Return the plan for a modulation, and whether a tile has one modulation for each of its rows.

    Otherwise a tile has one row of scale and shift, and must not have rows of two samples.
    """
    if modulation.scale is None:
        return plan, False
    if modulation.tokens == 1:
        return plan, True
    return within_samples(plan, x.shape[0] != modulation.tokens), False


def within_samples(plan: Plan, several: bool) -> Plan:
    """Return the plan with one row in a tile if there are several samples: no tile may mix them."""
    return replace(plan, BLOCK_M=1) if several else plan
