"""The base class of the fusers of modules: trace a module, recognise it, and replace its code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ... import library
from ...rewrites import rewrite
from ...rewrites.engine.report import Report, op_of, reason_for_none
from .. import classes
from ..planning import FusionPlan
from ..probing import NotAnOp, Probes, attributes_key, leaf_key
from ..sharding import shape_of
from ..tensor_parallel import call_class
from .installed import ModuleFacts, OpCaller, methods_of
from .module_trace import Case, FailsInTrace, ModuleTrace, Traced
from .program import Program, ProgramStep, write_program

# The dtypes of parameters and tensors in which the kernels compute.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Kind:
    """The base class of fusers: how one kind of module is recognised, and what is installed in it.

    `fuse` creates one object of each subclass in a call. docs/internals/kinds_of_fuse.md explains
    the steps.

    Attributes:
        name: the name under which the methods are registered in `classes`.
        title: the kind in its findings, which the report shows.
        method: the method that is replaced.
        rewrites: the rewrites that recognise the ops of such a module.
        ops: the ops that it may compute; empty for any op of `rewrites`.
        functions: the functions of torch that it may call besides children and ops, by name.
        casts: whether it may cast a tensor to the dtype of its first argument.
        returns: Tensor, or tuple if it may return several tensors.
    """

    name: str
    title: str
    method = "forward"
    rewrites: tuple[str, ...]
    ops: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    casts = False
    returns: type = Tensor

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            classes.kind(cls.name)(cls.methods)

    def __init__(self, model: nn.Module) -> None:
        self.probes = Probes()

    # Hooks, which subclasses override.

    def is_fused(self, name: str, module: nn.Module) -> bool:
        """Return whether a module is fused already."""
        return self.name in classes.overrides(module)

    def is_expected(self, name: str, module: nn.Module) -> bool:
        """Return whether a reader expects a module in the report, even if it is left. It has no
        other effect."""
        raise NotImplementedError

    def obstacle(self, module: nn.Module) -> str | None:
        """Return the reason to leave a module whatever it computes, or None."""
        raise NotImplementedError

    def with_forward_parameters(self, module: nn.Module) -> nn.Module:
        """Return the module, or a copy with the parameters that a forward sees."""
        return module

    def called_children(self, module: nn.Module) -> Collection[str]:
        """Return the children that the new code calls, and for which a trace has stand-ins."""
        return ()

    def traced_children(self, module: nn.Module) -> Collection[str]:
        """Return the children that the new code calls, and whose code is traced nevertheless."""
        return ()

    def rewrites_of(self, module: nn.Module) -> Collection[str]:
        """Return the rewrites to apply to the trace of the first case."""
        return self.rewrites

    def rewrites_to_compare(self, program: Program) -> Collection[str]:
        """Return the rewrites to apply to the traces of the other cases."""
        return self.rewrites

    def forms(self, module: nn.Module) -> Iterator[Any]:
        """Yield forms of calls to try in turn, until the module computes an op for one of them."""
        yield None

    def cases(self, module: nn.Module, form: Any) -> Iterator[Case]:
        """Yield the cases of a form. The program of the first must be that of all others."""
        raise NotImplementedError

    def check(self, traced: Traced) -> None:
        """Raise NotAnOp if a trace shows that the module is not of this kind."""

    def rewrite_graph(self, traced: Traced, names: Collection[str]) -> Report:
        """Apply rewrites to the graph of a trace, and return their report."""
        return rewrite(traced.graph, names, strict=True)

    def casts_of(self, traced: Traced) -> tuple[Collection[torch.dtype], Mapping[torch.dtype, int]]:
        """Return the arguments `dropped` and `kept` of `write_program` for a trace."""
        return (traced.case.dtype,) if self.casts else (), {}

    def details_of(self, module: nn.Module, form: Any, traced: Traced, program: Program) -> Any:
        """Return `ModuleFacts.details`, from the first trace."""
        return None

    def options(self, program: Program) -> dict[str, Any]:
        """Return the op's options that the report shows."""
        return program.ops[0].options()

    @staticmethod
    def caller(facts: ModuleFacts, op: ProgramStep, i: int) -> OpCaller:
        """Return the function that calls the i-th op of a program. It is given the op's arguments,
        and may return None to have the module's own code run."""
        return library.OPS[op.name].overload

    @classmethod
    def methods(cls, base: Any, facts: ModuleFacts) -> dict[str, Any]:
        """Return the methods to install in a subclass of `base`, by name."""
        return methods_of(cls.method, cls.caller, base, facts)

    # The steps that all kinds share.

    @classmethod
    def plan(cls, model: nn.Module) -> FusionPlan:
        """Plan the changes of a model."""
        return FusionPlan(cls.title, model, cls(model).look)

    def look(self, plan: FusionPlan, name: str, module: nn.Module) -> None:
        """Add a module to the plan, or raise NotAnOp with the reason to leave it."""
        if self.is_fused(name, module):
            return
        try:
            facts = self.facts(module)
            facts.assumptions.check(module)
        except NotAnOp:
            if not self.is_expected(name, module):
                return
            raise
        op = facts.program.ops[0].name.removesuffix("_forward")
        plan.fuse(name, module, op, self.options(facts.program))
        plan.changes.append(lambda: self.install(module, facts))

    def facts(self, module: nn.Module) -> ModuleFacts:
        """Return what replaces a module's code, from the cache if an equal module was traced.

        Raises:
            NotAnOp: the module is left; the text gives the reason.
        """
        module = self.with_forward_parameters(module)
        if reason := self.obstacle(module):
            raise NotAnOp(reason)
        return self.probes.once(self.key(module), lambda: self.derive_facts(module))

    def install(self, module: nn.Module, facts: ModuleFacts) -> None:
        classes.override(module, self.name, facts)
        call_class(module)

    def key(self, module: nn.Module) -> Any:
        """Return a key that is equal for modules whose traces are equal."""
        called = self.called_children(module)
        children = tuple(
            (name, width_of(child, "in_features"), width_of(child), has_state(child))
            if child is not None and name in called
            else (name, leaf_key(child), _parameter_shapes(child))
            for name, child in module._modules.items()
        )
        return classes.class_of(module), attributes_key(module), _parameter_shapes(module), children

    def derive_facts(self, module: nn.Module) -> ModuleFacts:
        """Trace a module, and return what replaces its code.

        Raises:
            NotAnOp: it computes no op, or something besides; the text gives the reason.
        """
        trace = ModuleTrace(
            module, self.called_children(module), self.method, self.traced_children(module)
        )
        refusals = []
        for form in self.forms(module):
            try:
                return self.verify_form(module, trace, form)
            except NotAnOp as refusal:
                refusals.append(refusal)
        # A refusal of a case that runs says more than the failure of one that does not.
        raise min(refusals, key=lambda refusal: isinstance(refusal, FailsInTrace))

    def verify_form(self, module: nn.Module, trace: ModuleTrace, form: Any) -> ModuleFacts:
        """Return what replaces a module's code in calls of a form, after comparing all cases.

        Raises:
            NotAnOp: a case fails, computes no op, or has another program than the first.
        """
        first, *others = self.cases(module, form)
        traced = trace.run(first)
        program = final = self.program(traced, self.rewrites_of(module))
        details = self.details_of(module, form, traced, program)
        proved = {(first.dtype, first.parameters): True}
        for case in others:
            dtypes = case.dtype, case.parameters
            try:
                final = self.compare(trace, program, case)
                proved.setdefault(dtypes, True)
            except case.tolerates:
                # In these dtypes the module's own code runs: `Assumptions.dtypes` lacks them.
                proved[dtypes] = False
        dtypes_of_op = [dtypes for dtypes, is_same in proved.items() if is_same]
        return ModuleFacts(final, details, trace.reads.assumptions(module, dtypes_of_op))

    def compare(self, trace: ModuleTrace, program: Program, case: Case) -> Program:
        """Trace a case, and return its program, which must equal `program` up to no-op casts.

        Raises:
            NotAnOp: it does not; the text names the case.
        """
        # A case gives only the arguments that the first trace used.
        shapes = {name: shape for name, shape in case.shapes.items() if name in program.used}
        case = replace(case, shapes=shapes)
        try:
            traced = trace.run(case)
            other = self.program(traced, self.rewrites_to_compare(program), program)
        except FailsInTrace:
            raise
        except NotAnOp as reason:
            raise NotAnOp(f"{reason} ({case})") from None
        if other != program:
            what = f"is {other}" if str(other) != str(program) else "computes something else"
            raise NotAnOp(f"it is {program} once, and it {what} in another case ({case})")
        if not self.casts:
            return program
        # With the casts to x's dtype as steps: the last case, whose dtypes differ, shows them all.
        kept = {traced.case.dtype: 0}
        return write_program(traced, self.ops, self.functions, kept=kept).rounding_as(program)

    def program(
        self, traced: Traced, names: Collection[str], first: Program | None = None
    ) -> Program:
        """Return the program of a trace. For a later trace than the first, `first` is the program
        of the first.

        Raises:
            NotAnOp: it returns something else than tensors, or computes no op or something besides.
        """
        y = traced.result
        leaves = y if type(y) is tuple and self.returns is not Tensor else [y]
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            wanted = "a tensor" if self.returns is Tensor else "a tuple of tensors"
            raise NotAnOp(f"it returns {type(y).__name__}, not {wanted}")
        self.check(traced)
        report = self.rewrite_graph(traced, names)
        ops = self.ops or tuple(names)
        if not any(op_of(node) in ops for node in traced.graph.graph.nodes):
            raise NotAnOp(reason_for_none(report, names))
        program = write_program(traced, ops, self.functions, *self.casts_of(traced))
        is_wide = traced.case.dtype in (torch.float32, torch.float64)
        return program.rounding_as(first) if first and is_wide else program


def obstacle(module: nn.Module, method: str = "forward") -> str | None:
    """Return the reason that a method cannot be overridden in the module's class, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if parametrize.is_parametrized(module):
        return "it is parametrized"
    if method in vars(module):
        return f"the instance has {'an' if method[0] == '_' else 'a'} {method} of its own"
    return None


def state_obstacle(module: nn.Module) -> str | None:
    names = [*module._parameters, *module._buffers]
    return f"it has parameters or buffers of its own: {', '.join(names)}" if names else None


def parameter_obstacle(module: nn.Module, prefix: str = "") -> str | None:
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) is not nn.Parameter:
            return f"{prefix}{name} is a {type(parameter).__name__}, not a plain Parameter"
    return None


def argument_obstacle(
    module: nn.Module, fits: Callable[[list[inspect.Parameter]], bool]
) -> str | None:
    """Return the reason that a forward's arguments do not fit, which names them, or None."""
    try:
        arguments = list(inspect.signature(module.forward).parameters.values())
    except ValueError:
        return "its forward has no signature"
    if fits(arguments):
        return None
    names = (str(argument.replace(annotation=argument.empty)) for argument in arguments)
    return f"its forward takes ({', '.join(names)})"


def width_of(child: Any, name: str = "out_features") -> int | None:
    """Return the width of a child's results, or inputs, by its attribute, or None without one."""
    width = getattr(child, name, None)
    return width if isinstance(width, int) else None


def has_state(child: nn.Module) -> bool:
    return any(True for _ in (*child.parameters(), *child.buffers()))


def _parameter_shapes(module: nn.Module | None) -> Any:
    parameters = {} if module is None else module._parameters
    return tuple(
        (name, None if parameter is None else (tuple(shape_of(parameter)), parameter.dtype))
        for name, parameter in parameters.items()
    )
