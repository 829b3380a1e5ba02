"""The arguments of a backward of rms_norm or layer_norm, which all its kernels share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...common.norms.backward import NormArguments
from ...common.sizes import cdiv
from .. import tiling
from ..partial_sums import partial_sums, summed
from ..tiling import Plan, launch


class NormBackward(NormArguments):
    """The arguments of the backward of a norm on an NPU. All tensors are contiguous."""

    @property
    def scale(self) -> Tensor | None:
        """The scale of each row's modulation, if each has its own."""
        return None if self.token is None else self.token.scale

    def plan(self, norm: str, forced: Plan | None) -> Plan:
        """Return the plan for the backward of this norm, or the forced one.

        The kernel for kept rows has no samples and no modulations: a forced plan with kept rows
        loses them there, and no modulated entry of COSTS has any.
        """
        if forced is not None:
            several = self.samples > 1 or self.token is not None
            return replace(forced, KEPT=0) if several else forced
        op = f"{norm}_backward"
        if self.is_modulated:
            op = f"modulated_{norm}_{'backward' if self.token is None else 'statistics'}"
        elif self.ds is not None:
            op = f"add_{op}" if self.dweight is not None else f"add_{op}_dx"
        gradients = (self.dweight, self.dbias)
        tensors = (self.x, self.dy, self.scale)
        N = self.x.shape[1]
        return tiling.plan(op, N, *tensors, weights=(self.weight,), gradients=gradients)

    def splits(self, plan: Plan) -> int:
        """Return how many programs share the rows of a sample, so that every core has work."""
        tiles = cdiv(self.tokens, plan.BLOCK_M)
        return max(1, min(tiles, plan.cores // self.samples))

    def items(self, splits: int) -> tuple[int | None, int | None]:
        """Return the numbers of samples and splits as kernels take them.

        Both are None for one sample: a program then has one work item, and the kernel no loop.
        """
        return (None, None) if self.samples == 1 else (self.samples, splits)

    def launch(
        self, kernel: Any, plan: Plan, tiles: int, parts: int, tensors: Sequence[Tensor | None],
        *numbers: float | None, **constants: Any,
    ) -> None:  # fmt: skip
        """Launch a kernel that stores `parts` partial sums of dweight and dbias, and sum these."""
        dweights, dbiases = partial_sums(self.dweight, parts), partial_sums(self.dbias, parts)
        launch(kernel, plan, tiles, *tensors, dweights, dbiases, *numbers, **constants)
        summed(dweights, self.dweight)
        summed(dbiases, self.dbias)
