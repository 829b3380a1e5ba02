"""Norms: the forward of a norm becomes one op."""

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
from ...rewrites.engine.report import Report, bound
from ...rewrites.engine.rewrite import before_widening
from .. import classes, sharding
from ..planning import FusionPlan
from ..probing import NotAnOp, dtype_name, own_attributes
from ..trace import ANY_SIZES
from . import modulated_norms
from .installed import ModuleFacts, OpCaller
from .kind import FLOATS, Kind, argument_obstacle, obstacle, parameter_obstacle
from .module_trace import Case, FailsInTrace, Traced, names_of
from .program import MODE, Parameter, Program, ProgramStep, Value

FUSED_CLASSES = (RMSNorm, FusedAddRMSNorm, GatedRMSNorm, LayerNorm, GroupNorm)

PARAMETERS = ("weight", "bias")

# Widths to try for modules without parameters. A norm of both widths takes any width.
ANY_WIDTHS = (40, 56)


@dataclass(frozen=True)
class _NormLayout:
    """A layout of a norm's input: channels last, or second. width is the number of channels."""

    width: int
    channels_last: bool

    def shape(self, dims: int) -> tuple[int, ...]:
        leading = tuple(ANY_SIZES[n] for n in {2: (4,), 3: (2, 3), 4: (5, 4, 2)}[dims])
        if self.channels_last:
            return (*leading, self.width)
        return (leading[0], self.width, *leading[1:])


class Norms(Kind):
    """Norms with at most a weight and a bias, of one dimension and one size. A norm is the same op
    for inputs of two, three and four dimensions."""

    name = title = "norm"
    rewrites = ("rms_norm", "layer_norm", "group_norm")

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.reported: Collection[str] = ()
        self.whole = sharding.whole_parameters(model)
        dtypes = {parameter.dtype for parameter in (*model.parameters(), *self.whole.values())}
        self.dtypes = [dtype for dtype in FLOATS if dtype in dtypes]

    @classmethod
    def plan(cls, model: nn.Module) -> FusionPlan:
        """Plan the changes of a model, those of modules that modulate norms included."""
        norms = cls(model)
        modulates = modulated_norms.ModulatedNorms(model, norms.width)
        modulated = FusionPlan(modulates.title, model, modulates.look)
        norms.reported = {finding.where for finding in modulated.findings}
        plan = FusionPlan(cls.title, model, norms.look)
        plan.findings += modulated.findings
        plan.changes += modulated.changes
        return plan

    def is_fused(self, name: str, module: nn.Module) -> bool:
        fused = isinstance(module, FUSED_CLASSES) or super().is_fused(name, module)
        modulates = modulated_norms.ModulatedNorms.name in classes.overrides(module)
        return fused or modulates or name in self.reported or "parametrizations" in name.split(".")

    def is_expected(self, name: str, module: nn.Module) -> bool:
        class_name = classes.class_of(module).__name__
        if class_name.endswith(("RMSNorm", "LayerNorm", "GroupNorm")):
            return True
        is_leaf = all(child is None for child in module._modules.values())
        named = "norm" in f"{class_name}.{name.rpartition('.')[2]}".lower()
        has_weight = "Norm" in class_name and "weight" in module._parameters
        return (named and (is_leaf or parametrize.is_parametrized(module))) or has_weight

    def with_forward_parameters(self, module: nn.Module) -> nn.Module:
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
        parameters = {
            name: parameter
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        for name, parameter in parameters.items():
            if not parameter.is_floating_point():
                return f"{name} is {parameter.dtype}"
        shapes = {tuple(parameter.shape) for parameter in parameters.values()}
        if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
            return f"its parameters have shapes {sorted(shapes)}, not one size"
        return argument_obstacle(module, _takes_norm_arguments)

    def rewrites_of(self, module: nn.Module) -> Collection[str]:
        is_gated = len(inspect.signature(module.forward).parameters) == 2
        return ("gated_rms_norm",) if is_gated else self.rewrites

    def forms(self, module: nn.Module) -> Iterator[_NormLayout]:
        own = [
            parameter.numel() for parameter in module._parameters.values() if parameter is not None
        ]
        sizes = _possible_widths(module)
        for width in own[:1] or (ANY_WIDTHS[0], *sizes):
            yield _NormLayout(width, True)
        for width in own[:1] or sorted(sizes, reverse=True):
            yield _NormLayout(width, False)

    def cases(self, module: nn.Module, form: _NormLayout) -> Iterator[Case]:
        names = names_of(module.forward)

        def case(dims: int, dtype: torch.dtype, own: torch.dtype | None = None, **how: Any) -> Case:
            shapes = dict.fromkeys(names, form.shape(dims))
            return Case(shapes, dict.fromkeys(names, dtype), own or dtype, **how)

        yield case(3, torch.bfloat16)
        yield case(2, torch.bfloat16, training=False)
        yield case(4, torch.float16)
        yield case(3, torch.float32)
        own = {one.dtype for one in module._parameters.values() if one is not None}
        if _fits_any_width(module, form):
            form = replace(form, width=ANY_WIDTHS[1])
            yield case(3, torch.bfloat16)
        for dtype in own:
            for other in self.dtypes:
                if other is not dtype:
                    # If the module fails, these dtypes do not occur together in the model.
                    yield case(3, other, dtype, tolerates=FailsInTrace)
        for training in (True, False):
            # Much code casts float64 to float32 too, and is then not the op in float64.
            yield case(3, torch.float64, training=training, tolerates=NotAnOp)

    def rewrites_to_compare(self, program: Program) -> Collection[str]:
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

    def rewrite_graph(self, traced: Traced, names: Collection[str]) -> Report:
        report = super().rewrite_graph(traced, names)
        for node, given in bound(traced.graph.graph.nodes):
            if given.get(MODE, "gemma") == "gemma":
                # A cast of the parameters to float32 is part of the op.
                given |= {one: before_widening(given[one]) for one in PARAMETERS if one in given}
            if given.get(MODE) == "gemma" and given["weight"] is None:
                # Without a weight the two modes are equal; choose one, so that programs compare.
                given[MODE] = "llama"
            node.args, node.kwargs = tuple(given.values()), {}
        return report

    def details_of(
        self, module: nn.Module, form: _NormLayout, traced: Traced, program: Program
    ) -> tuple[int | None, int]:
        """Return the width (None for a module without parameters that takes any), and the
        dimension that has it."""
        op = program.ops[0].name
        if (op != "group_norm") is not form.channels_last:
            raise NotAnOp(f"it is {op} of inputs of another layout")
        width = None if _fits_any_width(module, form) else form.width
        return width, -1 if form.channels_last else 1

    @staticmethod
    def caller(facts: ModuleFacts, op: ProgramStep, i: int) -> OpCaller:
        overload, dtypes = library.OPS[op.name].overload, facts.assumptions.dtypes
        width, dim = facts.details
        tensors = [
            j for j, argument in enumerate(op.args[1:]) if isinstance(argument, (Value, Parameter))
        ]

        def norm(x: Any, *others: Any) -> Any:
            if width is not None and x.shape[dim] != width:
                return None
            # Under autocast the op's own rule casts its arguments, whatever their dtypes.
            if not torch.is_autocast_enabled(x.device.type):
                for j in tensors:
                    if (x.dtype, others[j].dtype) not in dtypes:
                        return None
            return overload(x, *others)

        return norm

    def width(self, module: nn.Module) -> int | None:
        """Return the width of an rms_norm or layer_norm, or None if it takes any width.

        Raises:
            NotAnOp: the module is neither.
        """
        if isinstance(module, (RMSNorm, LayerNorm)):
            width: Any = module.hidden_size
            return None if width is None else int(width)
        facts = self.facts(module)
        op = facts.program.ops[0].name
        if op not in ("rms_norm", "layer_norm"):
            raise NotAnOp(f"it is {op}")
        found: int | None = facts.details[0]
        return found


def _fits_any_width(module: nn.Module, form: _NormLayout) -> bool:
    """Return whether a form is the one that stands for any width."""
    has_own = any(parameter is not None for parameter in module._parameters.values())
    return not has_own and form == _NormLayout(ANY_WIDTHS[0], True)


def _takes_norm_arguments(parameters: list[inspect.Parameter]) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    is_gated = [parameter.name for parameter in parameters[1:]] == ["gate"]
    return (len(parameters) == 1 or is_gated) and all(
        parameter.kind in kinds for parameter in parameters
    )


def _possible_widths(module: nn.Module) -> list[int]:
    """Return the possible widths among a module's attributes: ints, and tuples of one int."""
    found: dict[int, None] = {}
    for value in own_attributes(module).values():
        if isinstance(value, (tuple, list)) and len(value) == 1:
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**20:
            found[value] = None
    return list(found)
