"""A kind of module: what is traced, which rewrites say what it is, and what is installed."""

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
from ...rewrites.engine.recognise import op_of, reason_for_none
from ...rewrites.engine.report import Report
from .. import classes
from ..planning import Plan
from ..probing import NotAnOp, Probes, attributes_key, leaf_key
from ..sharding import shape_of
from .installed import Called, Facts, methods_of
from .module_trace import Case, FailsInTrace, ModuleTrace, Traced
from .program import Program, Step, written


class Kind:
    """A row of the table of kinds; one object for each call of `fuse`.

    name: by which it is registered. title: that of its findings. method: what is replaced.
    rewrites: which say what it is. ops: of which it computes one, if these are not all. functions:
    what it may compute beside children and ops, by names in torch. casts: whether it may cast to
    x's dtype. returns: what it may return.
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

    # What a kind says of a module.

    def is_fused(self, name: str, module: nn.Module) -> bool:
        return self.name in classes.overrides(module)

    def is_expected(self, name: str, module: nn.Module) -> bool:
        """Whether a reader of the report expects a module in it. It has no other effect."""
        raise NotImplementedError

    def obstacle(self, module: nn.Module) -> str | None:
        """Reason that a module is left whatever it computes, or None."""
        raise NotImplementedError

    def of_forward(self, module: nn.Module) -> nn.Module:
        """A module with the parameters that a forward sees."""
        return module

    def called(self, module: nn.Module) -> Collection[str]:
        """The children that the new code calls too."""
        return ()

    def kept(self, module: nn.Module) -> Collection[str]:
        """The children whose code is traced, and that the new code calls."""
        return ()

    def names(self, module: nn.Module) -> Collection[str]:
        """The rewrites that may say what a module is."""
        return self.rewrites

    def again(self, program: Program) -> Collection[str]:
        """The rewrites that show whether another case is the same."""
        return self.rewrites

    def forms(self, module: nn.Module) -> Iterator[Any]:
        """The forms of calls to try, until the module computes an op of one."""
        yield None

    def cases(self, module: nn.Module, form: Any) -> Iterator[Case]:
        """The cases in which it must compute the same."""
        raise NotImplementedError

    def check(self, traced: Traced) -> None:
        """Raise NotAnOp for a trace that is none of this kind."""

    def rewritten(self, traced: Traced, names: Collection[str]) -> Report:
        """Replace what ops compute in the graph of a trace."""
        return rewrite(traced.graph, names, strict=True)

    def casts_of(self, traced: Traced) -> tuple[Collection[torch.dtype], Mapping[torch.dtype, int]]:
        """The casts in a trace that are no steps, and those that are, as `written` takes them."""
        return (traced.case.dtype,) if self.casts else (), {}

    def form_of(self, module: nn.Module, form: Any, traced: Traced, program: Program) -> Any:
        """What `Facts.form` is, of the first trace."""
        return None

    def options(self, program: Program) -> dict[str, Any]:
        """What the report says of the op."""
        return program.ops[0].options()

    @staticmethod
    def caller(facts: Facts, op: Step, i: int) -> Called:
        """The function that calls the i-th op of a program with its arguments."""
        return library.OPS[op.name].overload

    @classmethod
    def methods(cls, base: Any, facts: Facts) -> dict[str, Any]:
        """The methods that are installed."""
        return methods_of(cls.method, cls.caller, base, facts)

    # What all kinds share.

    @classmethod
    def plan(cls, model: nn.Module) -> Plan:
        """What is to be replaced in a model."""
        return Plan(cls.title, model, cls(model).look)

    def look(self, plan: Plan, name: str, module: nn.Module) -> None:
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

    def facts(self, module: nn.Module) -> Facts:
        """What replaces a module's code. Raises NotAnOp if it is left."""
        module = self.of_forward(module)
        if reason := self.obstacle(module):
            raise NotAnOp(reason)
        return self.probes.once(self.key(module), lambda: self.found(module))

    def install(self, module: nn.Module, facts: Facts) -> None:
        classes.override(module, self.name, facts)

    def key(self, module: nn.Module) -> Any:
        """Key of everything that a trace can depend on."""
        called = self.called(module)
        children = tuple(
            (name, width_of(child, "in_features"), width_of(child), has_state(child))
            if child is not None and name in called
            else (name, leaf_key(child), _shapes(child))
            for name, child in module._modules.items()
        )
        return classes.class_of(module), attributes_key(module), _shapes(module), children

    def found(self, module: nn.Module) -> Facts:
        """What replaces a module's code.

        Raises:
            NotAnOp: it computes no op, or more; the text gives the reason.
        """
        trace = ModuleTrace(module, self.called(module), self.method, self.kept(module))
        refusals = []
        for form in self.forms(module):
            try:
                return self.verified(module, trace, form)
            except NotAnOp as refusal:
                refusals.append(refusal)
        # A refusal of a case that runs says more than the failure of one that does not.
        raise min(refusals, key=lambda refusal: isinstance(refusal, FailsInTrace))

    def verified(self, module: nn.Module, trace: ModuleTrace, form: Any) -> Facts:
        """The program, which must be the same in all cases."""
        first, *others = self.cases(module, form)
        traced = trace.run(first)
        program = final = self.program(traced, self.names(module))
        known = self.form_of(module, form, traced, program)
        proved = {(first.dtype, first.parameters): True}
        for case in others:
            dtypes = case.dtype, case.parameters
            try:
                final = self.compare(trace, program, case)
                proved.setdefault(dtypes, True)
            except case.tolerates:
                proved[dtypes] = False
        dtypes_of_op = [dtypes for dtypes, is_same in proved.items() if is_same]
        return Facts(final, known, trace.reads.assumptions(module, dtypes_of_op))

    def compare(self, trace: ModuleTrace, program: Program, case: Case) -> Program:
        """The program of a case, which must be `program`, but for casts that do nothing there."""
        shapes = {name: shape for name, shape in case.shapes.items() if name in program.used}
        case = replace(case, shapes=shapes)
        try:
            traced = trace.run(case)
            found = self.program(traced, self.again(program), program)
        except FailsInTrace:
            raise
        except NotAnOp as reason:
            raise NotAnOp(f"{reason} ({case})") from None
        if found != program:
            what = f"is {found}" if str(found) != str(program) else "computes something else"
            raise NotAnOp(f"it is {program} once, and it {what} in another case ({case})")
        if not self.casts:
            return program
        kept = {traced.case.dtype: 0}
        return written(traced, self.ops, self.functions, kept=kept).rounding_as(program)

    def program(
        self, traced: Traced, names: Collection[str], first: Program | None = None
    ) -> Program:
        """The program of a trace, and of a later one than the first."""
        y = traced.result
        leaves = y if type(y) is tuple and self.returns is not Tensor else [y]
        if not all(isinstance(one, Tensor) for one in leaves):
            wanted = "a tensor" if self.returns is Tensor else "a tuple of tensors"
            raise NotAnOp(f"it returns {type(y).__name__}, not {wanted}")
        self.check(traced)
        report = self.rewritten(traced, names)
        ops = self.ops or tuple(names)
        if not any(op_of(node) in ops for node in traced.graph.graph.nodes):
            raise NotAnOp(reason_for_none(report, names))
        program = written(traced, ops, self.functions, *self.casts_of(traced))
        is_wide = traced.case.dtype in (torch.float32, torch.float64)
        return program.rounding_as(first) if first and is_wide else program


def obstacle(module: nn.Module, method: str = "forward") -> str | None:
    """Reason that a method cannot be overridden by one that calls children, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if parametrize.is_parametrized(module):
        return "it is parametrized"
    if method in vars(module):
        return f"the instance has {'an' if method[0] == '_' else 'a'} {method} of its own"
    return None


def state_obstacle(module: nn.Module) -> str | None:
    own = [*module._parameters, *module._buffers]
    return f"it has parameters or buffers of its own: {', '.join(own)}" if own else None


def parameter_obstacle(module: nn.Module, prefix: str = "") -> str | None:
    for name, one in module._parameters.items():
        if one is not None and type(one) is not nn.Parameter:
            return f"{prefix}{name} is a {type(one).__name__}, not a plain Parameter"
    return None


def argument_obstacle(
    module: nn.Module, fits: Callable[[list[inspect.Parameter]], bool]
) -> str | None:
    """The arguments of a forward, as a reason to leave a module that they do not fit, or None."""
    try:
        arguments = list(inspect.signature(module.forward).parameters.values())
    except ValueError:
        return "its forward has no signature"
    if fits(arguments):
        return None
    names = (str(argument.replace(annotation=argument.empty)) for argument in arguments)
    return f"its forward takes ({', '.join(names)})"


def width_of(child: Any, name: str = "out_features") -> int | None:
    """How wide a child says that its results, or inputs, are."""
    width = getattr(child, name, None)
    return width if isinstance(width, int) else None


def has_state(child: nn.Module) -> bool:
    return any(True for _ in (*child.parameters(), *child.buffers()))


def _shapes(module: nn.Module | None) -> Any:
    own = {} if module is None else module._parameters
    return tuple(
        (name, None if one is None else (tuple(shape_of(one)), one.dtype))
        for name, one in own.items()
    )
