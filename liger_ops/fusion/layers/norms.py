"""Norms: their forward becomes one op."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ... import library
from ...nn import FusedAddRMSNorm, GatedRMSNorm, GroupNorm, LayerNorm, RMSNorm
from ...rewrites.engine.recognise import bound
from ...rewrites.engine.report import Report
from ...rewrites.engine.rewrite import before_widening
from .. import classes, sharding, tensor_parallel
from ..planning import Plan
from ..probing import NotAnOp, dtype_name, own_attributes
from ..trace import ANY_SIZES
from . import modulated_norms
from .installed import Called, Facts
from .kind import Kind, argument_obstacle, obstacle, parameter_obstacle
from .module_trace import Case, FailsInTrace, Traced, names_of
from .program import MODE, Parameter, Program, Step, Value

FUSED_CLASSES = (RMSNorm, FusedAddRMSNorm, GatedRMSNorm, LayerNorm, GroupNorm)

PARAMETERS = ("weight", "bias")

# Widths for modules without parameters. A norm over rows of both widths has no width of its own.
ANY_WIDTHS = (40, 56)


@dataclass(frozen=True)
class _Form:
    """How a norm is called: with channels last, or second. width is the size of that dimension."""

    width: int
    channels_last: bool

    def shape(self, dims: int) -> tuple[int, ...]:
        leading = tuple(ANY_SIZES[n] for n in {2: (4,), 3: (2, 3), 4: (5, 4, 2)}[dims])
        if self.channels_last:
            return (*leading, self.width)
        return (leading[0], self.width, *leading[1:])


class Norms(Kind):
    """The parameters, at most a weight and a bias, are one-dimensional and of one size. It is the
    same op for inputs of two, three and four dimensions."""

    name = title = "norm"
    rewrites = ("rms_norm", "layer_norm", "group_norm")

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.told: Collection[str] = ()
        self.whole = sharding.whole_parameters(model)
        dtypes = {parameter.dtype for parameter in (*model.parameters(), *self.whole.values())}
        self.dtypes = [
            dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if dtype in dtypes
        ]

    @classmethod
    def plan(cls, model: nn.Module) -> Plan:
        """What is to be replaced in a model, also in modules that modulate norms."""
        norms = cls(model)
        modulates = modulated_norms.ModulatedNorms(model, norms.width)
        modulated = Plan(modulates.title, model, modulates.look)
        norms.told = {finding.where for finding in modulated.findings}
        plan = Plan(cls.title, model, norms.look)
        plan.findings += modulated.findings
        plan.changes += modulated.changes
        return plan

    def is_fused(self, name: str, module: nn.Module) -> bool:
        fused = isinstance(module, FUSED_CLASSES) or super().is_fused(name, module)
        modulates = modulated_norms.ModulatedNorms.name in classes.overrides(module)
        return fused or modulates or name in self.told or "parametrizations" in name.split(".")

    def is_expected(self, name: str, module: nn.Module) -> bool:
        class_name = classes.class_of(module).__name__
        if class_name.endswith(("RMSNorm", "LayerNorm", "GroupNorm")):
            return True
        is_leaf = all(child is None for child in module._modules.values())
        named = "norm" in f"{class_name}.{name.rpartition('.')[2]}".lower()
        has_weight = "Norm" in class_name and "weight" in module._parameters
        return (named and (is_leaf or parametrize.is_parametrized(module))) or has_weight

    def of_forward(self, module: nn.Module) -> nn.Module:
        if sharding.is_managed(module):
            return sharding.with_whole_parameters(module, self.whole)
        return module

    def obstacle(self, module: nn.Module) -> str | None:
        if reason := obstacle(module):
            return reason
        if any(child is not None for child in module._modules.values()):
            return "it holds other modules"
        if module._buffers:
            return f"it has buffers: {', '.join(module._buffers)}"
        unknown = [name for name in module._parameters if name not in PARAMETERS]
        if unknown:
            return f"it has other parameters than weight and bias: {', '.join(unknown)}"
        if reason := parameter_obstacle(module):
            return reason
        own = {name: one for name, one in module._parameters.items() if one is not None}
        for name, one in own.items():
            if not one.is_floating_point():
                return f"{name} is {one.dtype}"
        shapes = {tuple(one.shape) for one in own.values()}
        if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
            return f"its parameters have shapes {sorted(shapes)}, not one size"
        return argument_obstacle(module, _are_of_a_norm)

    def names(self, module: nn.Module) -> Collection[str]:
        is_gated = len(inspect.signature(module.forward).parameters) == 2
        return ("gated_rms_norm",) if is_gated else self.rewrites

    def forms(self, module: nn.Module) -> Iterator[_Form]:
        own = [one.numel() for one in module._parameters.values() if one is not None]
        sizes = _sizes(module)
        for width in own[:1] or (ANY_WIDTHS[0], *sizes):
            yield _Form(width, True)
        for width in own[:1] or sorted(sizes, reverse=True):
            yield _Form(width, False)

    def cases(self, module: nn.Module, form: _Form) -> Iterator[Case]:
        names = names_of(module.forward)

        def case(dims: int, dtype: torch.dtype, own: torch.dtype | None = None, **how: Any) -> Case:
            shapes = dict.fromkeys(names, form.shape(dims))
            return Case(shapes, dict.fromkeys(names, dtype), own or dtype, **how)

        yield case(3, torch.bfloat16)
        yield case(2, torch.bfloat16, training=False)
        yield case(4, torch.float16)
        yield case(3, torch.float32)
        own = {one.dtype for one in module._parameters.values() if one is not None}
        if _is_any(module, form):
            form = replace(form, width=ANY_WIDTHS[1])
            yield case(3, torch.bfloat16)
        for dtype in own:
            for other in self.dtypes:
                if other is not dtype:
                    # If the module fails, these dtypes cannot occur in the model.
                    yield case(3, other, dtype, tolerates=FailsInTrace)
        for training in (True, False):
            # In float64 much code rounds to float32, and is no op.
            yield case(3, torch.float64, training=training, tolerates=NotAnOp)

    def again(self, program: Program) -> Collection[str]:
        return (program.ops[0].name,)

    def check(self, traced: Traced) -> None:
        case, y = traced.case, traced.result
        x = case.shapes[case.first]
        if tuple(y.shape) != x:
            raise NotAnOp(f"it returns shape {tuple(y.shape)} for an input of {x}")
        if y.dtype is not case.dtype:
            raise NotAnOp(
                f"it returns {dtype_name(y.dtype)} for input of {dtype_name(case.dtype)} and"
                f" parameters of {dtype_name(case.parameters)}; the ops keep the input's dtype"
            )

    def rewritten(self, traced: Traced, names: Collection[str]) -> Report:
        report = super().rewritten(traced, names)
        for node, given in bound(traced.graph.graph.nodes):
            if given.get(MODE, "gemma") == "gemma":
                # The op multiplies by them in float32 anyhow.
                given |= {one: before_widening(given[one]) for one in PARAMETERS if one in given}
            if given.get(MODE) == "gemma" and given["weight"] is None:
                # Without a weight to multiply by the two modes are equal.
                given[MODE] = "llama"
            node.args, node.kwargs = tuple(given.values()), {}
        return report

    def form_of(
        self, module: nn.Module, form: _Form, traced: Traced, program: Program
    ) -> tuple[int | None, int]:
        """The width, None for a module without parameters that takes any, and its dimension."""
        op = program.ops[0].name
        if (op != "group_norm") is not form.channels_last:
            raise NotAnOp(f"it is {op} of inputs of another layout")
        return None if _is_any(module, form) else form.width, -1 if form.channels_last else 1

    def install(self, module: nn.Module, facts: Facts) -> None:
        super().install(module, facts)
        style = tensor_parallel.style_of(module)
        if style is not None:
            tensor_parallel.call_class(module, style)

    @staticmethod
    def caller(facts: Facts, op: Step, i: int) -> Called:
        overload, dtypes = library.OPS[op.name].overload, facts.assumptions.dtypes
        width, dim = facts.form
        tensors = [j for j, one in enumerate(op.args[1:]) if isinstance(one, (Value, Parameter))]

        def norm(x: Any, *others: Any) -> Any:
            if width is not None and x.shape[dim] != width:
                return None
            # The op's rule for autocast says what it casts.
            if not torch.is_autocast_enabled(x.device.type):
                for j in tensors:
                    if (x.dtype, others[j].dtype) not in dtypes:
                        return None
            return overload(x, *others)

        return norm

    def width(self, module: nn.Module) -> int | None:
        """The width of an rms_norm or layer_norm, None for any."""
        if isinstance(module, (RMSNorm, LayerNorm)):
            width: Any = module.hidden_size
            return None if width is None else int(width)
        facts = self.facts(module)
        op = facts.program.ops[0].name
        if op not in ("rms_norm", "layer_norm"):
            raise NotAnOp(f"it is {op}")
        found: int | None = facts.form[0]
        return found


def _is_any(module: nn.Module, form: _Form) -> bool:
    """Whether the width of a form stands for any."""
    has_own = any(one is not None for one in module._parameters.values())
    return not has_own and form == _Form(ANY_WIDTHS[0], True)


def _are_of_a_norm(given: list[inspect.Parameter]) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    is_gated = [one.name for one in given[1:]] == ["gate"]
    return (len(given) == 1 or is_gated) and all(one.kind in kinds for one in given)


def _sizes(module: nn.Module) -> list[int]:
    """Possible widths among the attributes of a module: ints, and tuples of one int."""
    found: dict[int, None] = {}
    for value in own_attributes(module).values():
        if isinstance(value, (tuple, list)) and len(value) == 1:
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**20:
            found[value] = None
    return list(found)
