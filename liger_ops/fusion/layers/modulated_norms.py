"""Norms that their module modulates, as AdaLN of diffusers: its forward calls the op.

The module projects an embedding, takes scale and shift from the projection, modulates the norm of
its input, and returns that, often with other chunks of the projection. Its class is overridden with
a forward that calls the same children, but for the norms, and the op.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import library
from .. import classes
from ..assumptions import Assumptions
from ..planning import Plan
from ..probing import NotAnOp, Probes, attributes_key, leaf_key
from .modulated_norm_code import FUNCTIONS, TENSORS, Program
from .modulated_norm_trace import found, is_projection

KIND = "modulated norm"

# Names of modules that a reader expects in the report.
NAME = re.compile(r"Ada(ptive)?(Layer|RMS|Rms)?Norm|NormZero|NormContinuous")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# More children than in any module that computes one or two modulated norms and nothing else.
MOST_CHILDREN = 6


def plan(model: nn.Module, width_of: Callable[[nn.Module], int | None]) -> Plan:
    """Override the forward of every module of a model that modulates its norms.

    `width_of` is the width of a norm, None for any, and raises NotAnOp for other modules.
    """
    probes = Probes()

    def look(plan: Plan, name: str, module: nn.Module) -> None:
        if KIND in classes.overrides(module):
            return
        try:
            if reason := _obstacle(module):
                raise NotAnOp(reason)
            norms = _norms(module, width_of)
            if reason := _norm_obstacle(module, norms):
                raise NotAnOp(reason)
            facts = probes.once(_key(module, norms), lambda: found(module, norms))
            program, assumptions = facts
            assumptions.check(module)
        except NotAnOp:
            if not NAME.search(classes.class_of(module).__name__) or not module._modules:
                return
            raise
        plan.fuse(name, module, program.ops[0].name, dict(program.ops[0].options))
        plan.changes.append(lambda: classes.override(module, KIND, facts))

    return Plan(KIND, model, look)


@classes.kind(KIND)
def methods(base: Any, facts: tuple[Program, Assumptions]) -> dict[str, Callable[..., Any]]:
    program, assumptions = facts
    names = list(inspect.signature(base.forward).parameters)[1:]
    ops = [library.OPS[op.name].overload for op in program.ops]

    def modulate(i: int, x: Tensor, scale: Tensor, *rest: Tensor | None) -> Tensor | None:
        op = program.ops[i]
        if not _is_usual(op.ranks, program.is_cast, x, scale, *rest):
            return None
        tensors = dict(zip(TENSORS[2:], rest, strict=False))
        device = x.device.type
        is_off = not program.is_cast and torch.is_autocast_enabled(device)
        off = torch.autocast(device, enabled=False) if is_off else contextlib.nullcontext()
        with off:
            return ops[i](x, scale, **tensors, **dict(op.options))

    unused = [name for name in names if name not in program.used]
    other = [f"{name} is None" for name in program.used] + [f"{n} is not None" for n in unused]
    other.append(f"not hold(self, {names[0]})")
    original = f"return original(self, {', '.join(names)})"
    body = [f"if {' or '.join(other)}:", f"    {original}"]
    for line in program.lines:
        body.append(line)
        result, _, call = line.partition(" = ")
        if call.startswith("modulate("):
            body += [f"if {result} is None:", f"    {original}"]
        elif call.startswith("getattr("):
            body += [f"if not isinstance({result}, torch.Tensor):", f"    {original}"]
    source = "\n    ".join([f"def forward(self, {', '.join(names)}):", *body])
    namespace: dict[str, Any] = {
        **{name: getattr(torch, name, None) or getattr(F, name) for name in FUNCTIONS},
        "torch": torch, "original": base.forward, "modulate": modulate,
        "hold": assumptions.hold,
    }  # fmt: skip
    exec(source, namespace)
    return {"forward": classes.in_place_of(base.forward, namespace["forward"])}


def _is_usual(
    ranks: tuple[int, int], is_cast: bool, x: Tensor, scale: Tensor, *rest: Tensor | None
) -> bool:
    """Whether the op computes what the code does: the traced dimensions, rows of scale that the op
    takes as PyTorch broadcasts them, and a result of x's dtype."""
    shift, *parameters = rest
    if (x.dim(), scale.dim()) != ranks or not _has_rows_of(x, scale):
        return False
    if shift is not None and shift.shape != scale.shape:
        return False
    rows = [scale] if shift is None else [scale, shift]
    given = [one for one in parameters if one is not None]
    if any(one.dtype not in FLOATS for one in (x, *rows, *given)):
        return False
    device = x.device.type
    if is_cast and device in library.AUTOCAST_KEYS and torch.is_autocast_enabled(device):
        return True
    return all(one.dtype is x.dtype for one in given) and all(
        torch.promote_types(x.dtype, one.dtype) is x.dtype for one in rows
    )


def _has_rows_of(x: Tensor, scale: Tensor) -> bool:
    """Whether scale has one row for all of x, or for each sample, or for each token."""
    *rows, width = scale.shape
    if width != x.shape[-1]:
        return False
    if all(size == 1 for size in rows[1:]):
        return rows[:1] in ([], [1], [x.shape[0]])
    return rows == list(x.shape[:-1])


def _norms(module: nn.Module, width_of: Callable[[nn.Module], int | None]) -> dict[str, int | None]:
    """The names and widths of the children that are norms."""
    norms: dict[str, int | None] = {}
    reasons = {}
    for name, child in module._modules.items():
        if child is None or is_projection(child):
            continue
        try:
            norms[name] = width_of(child)
        except NotAnOp as reason:
            reasons[name] = f"it has no norm that is an op; {name}: {reason}"
    if not norms:
        # Names only choose the reason.
        named = (reason for name, reason in reasons.items() if "norm" in name)
        raise NotAnOp(next(named, "it has no norm"))
    return norms


def _key(module: nn.Module, norms: dict[str, int | None]) -> Any:
    """Key of everything that a trace can depend on."""
    children = tuple(
        (
            name,
            _norm_key(child) if name in norms and child is not None else None,
            child is None,
            getattr(child, "in_features", None),
            getattr(child, "out_features", None),
        )
        for name, child in module._modules.items()
    )
    return classes.class_of(module), attributes_key(module), children


def _norm_key(norm: nn.Module) -> Any:
    shapes = tuple((n, None if p is None else tuple(p.shape)) for n, p in norm._parameters.items())
    return leaf_key(norm), shapes


def _obstacle(module: nn.Module) -> str | None:
    """Reason that a module is left, whatever its norms are, or None."""
    children = [child for child in module._modules.values() if child is not None]
    projections = [child for child in children if is_projection(child)]
    if not 2 <= len(children) <= MOST_CHILDREN or not 1 <= len(projections) <= 2:
        return f"it has {len(children)} children, and {len(projections)} that may be projections"
    if reason := classes.obstacle(module):
        return reason
    arguments = list(inspect.signature(module.forward).parameters.values())
    if len(arguments) < 2 or any(one.kind is not one.POSITIONAL_OR_KEYWORD for one in arguments):
        return f"its forward takes ({', '.join(map(str, arguments))})"
    return None


def _norm_obstacle(module: nn.Module, norms: dict[str, int | None]) -> str | None:
    for name in norms:
        norm = module._modules[name]
        assert norm is not None
        for own, one in norm._parameters.items():
            if one is not None and type(one) is not nn.Parameter:
                return f"{name}.{own} is a {type(one).__name__}, not a plain Parameter"
    return None
