"""Manifold-constrained hyper-connections: a module's forward becomes mhc_coeffs and mhc_pre.

In transformers this is a module with the parameters fn, base and scale, which returns the layer's
input and the weights of the streams after the layer. The streams are mixed in the decoder layer's
forward, which does other things too, and which `fuse` does not change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ... import library
from ...nn import MHCCoeffs
from .. import classes, sharding
from ..trace import ANY_SIZES
from .installed import ModuleFacts, OpCaller
from .kind import FLOATS, Kind, obstacle, parameter_obstacle, state_obstacle
from .module_trace import Case, Traced, names_of
from .program import Program, ProgramStep

# Names of classes that a reader expects in the report.
NAME = re.compile(r"HyperConnection|HyperHead|mHC|MHC")


class HyperConnections(Kind):
    """Hyper-connections, which are the same ops in every dtype and mode."""

    name = title = "hyper connection"
    rewrites = ("mhc_coeffs", "mhc_pre")
    ops = ("mhc_coeffs_forward", "mhc_pre")
    functions = ("t", "transpose", "unbind")
    returns = tuple

    def is_fused(self, name: str, module: nn.Module) -> bool:
        return isinstance(module, MHCCoeffs) or super().is_fused(name, module)

    def is_expected(self, name: str, module: nn.Module) -> bool:
        return bool(NAME.search(classes.class_of(module).__name__) and module._parameters)

    def obstacle(self, module: nn.Module) -> str | None:
        sizes = _stream_sizes(module)
        if isinstance(sizes, str):
            return sizes
        if reason := obstacle(module):
            return reason
        if module._buffers:
            return f"it has buffers: {', '.join(module._buffers)}"
        if not sharding.is_held_by_fsdp(module) and (reason := parameter_obstacle(module)):
            return reason
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype not in FLOATS:
                return f"{name} is {parameter.dtype}"
        for name, child in module.named_modules():
            if child is not module and state_obstacle(child):
                return f"{name} has parameters or buffers"
        return None

    def cases(self, module: nn.Module, form: Any) -> Iterator[Case]:
        (name,) = names_of(module.forward)
        half, bfloat, single = torch.float16, torch.bfloat16, torch.float32
        for dtype, own, training in (
            (bfloat, bfloat, True), (bfloat, single, False),
            (half, half, True), (single, single, False),
        ):  # fmt: skip
            rows = [ANY_SIZES[n] for n in ((2, 3) if training else (4, 5))]
            shapes = {name: (*rows, *_stream_sizes(module))}
            yield Case(shapes, {name: dtype}, own, training=training)

    def details_of(
        self, module: nn.Module, form: Any, traced: Traced, program: Program
    ) -> tuple[int, ...]:
        """Return the number of streams, and their width."""
        return traced.case.shapes[traced.case.first][2:]

    @staticmethod
    def caller(facts: ModuleFacts, op: ProgramStep, i: int) -> OpCaller:
        overload, sizes = library.OPS[op.name].overload, facts.details
        if op.name == "mhc_pre":
            return overload

        def coefficients(x: Tensor, *rest: Any) -> Any:
            return overload(x, *rest) if _computes_the_same(x, sizes, *rest[:5]) else None

        return coefficients


def _computes_the_same(x: Tensor, sizes: tuple[int, ...], phi: Tensor, *others: Tensor) -> bool:
    """Return whether the op computes what the code does, in the same dtypes.

    The code computes float64 in float32, and the op does not. Under autocast the code returns the
    dtype of its parameters, and the op float32.
    """
    if x.dim() != 4 or tuple(x.shape[2:]) != sizes:
        return False
    if any(tensor.dtype not in FLOATS for tensor in (x, phi, *others)):
        return False
    wide = all(tensor.dtype is torch.float32 for tensor in others)
    return wide or not torch.is_autocast_enabled(x.device.type)


def _stream_sizes(module: nn.Module) -> tuple[int, int] | str:
    """Return the number of streams and their width, from the sizes of the parameters, or the reason
    that these are not those of a connection."""
    shapes = {
        n: tuple(parameter.shape)
        for n, parameter in module._parameters.items()
        if parameter is not None
    }
    if len(shapes) == 3:
        scale, base, fn = sorted(shapes.values(), key=math.prod)
        if len(fn) == 2 and scale == (3,) and base == fn[:1]:
            hc = math.isqrt(base[0] + 1) - 1
            hidden_size, rest = divmod(fn[1], max(hc, 1))
            if hc >= 1 and hc * (hc + 2) == base[0] and rest == 0 and hidden_size >= 1:
                return hc, hidden_size
    text = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    return (
        f"its parameters are {text}, not those of mhc_coeffs: (hc * (hc + 2), hc * C),"
        " (hc * (hc + 2),) and (3,)"
    )
