"""A kind of module that `fuse` replaces the code of: what is traced, which rewrites say what it is,
and what is installed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ... import library
from ...rewrites import rewrite
from ...rewrites.engine.recognise import none_of
from ...rewrites.engine.report import Report
from .. import classes
from ..planning import Plan
from ..probing import NotAnOp, Probes, attributes_key, leaf_key
from ..sharding import shape_of
from .installed import Called, Facts, methods_of
from .module_trace import Case, FailsInTrace, ModuleTrace, Traced
from .program import Program, Step, op_of, written


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
    returns: tuple[type, ...] = (Tensor,)

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            make = functools.partial(methods_of, cls.method, cls.caller)
            classes.kind(cls.name)(make)

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.probes = Probes()

    # What a kind says of a module.

    def is_fused(self, name: str, module: nn.Module) -> bool:
        return self.name in classes.overrides(module)

    def is_expected(self, name: str, module: nn.Module) -> bool:
        """Whether a reader of the report expects a module in it. It has no other effect."""
        raise NotImplementedError

    def checked(self, module: nn.Module) -> nn.Module:
        """The module to be traced. Raises NotAnOp if it is left whatever it computes."""
        raise NotImplementedError

    def names(self, module: nn.Module) -> Collection[str]:
        """The rewrites that may say what a module is."""
        return self.rewrites

    def called(self, module: nn.Module) -> Collection[str]:
        """The children that the new code calls too."""
        return ()

    def forms(self, module: nn.Module) -> Iterator[Any]:
        """The forms of calls to try, until the module computes an op of one."""
        yield None

    def case(self, module: nn.Module, form: Any) -> Case:
        """The first case that is traced."""
        raise NotImplementedError

    def others(self, module: nn.Module, form: Any, first: Case) -> Iterator[Case]:
        """Cases in which it must compute the same."""
        raise NotImplementedError

    def more(self, module: nn.Module, form: Any, first: Case) -> Iterator[list[Case]]:
        """Cases in whose dtypes it is fused if it computes the same in all of a list."""
        yield from ()

    def rewritten(self, traced: Traced, names: Collection[str]) -> Report:
        """Replace what ops compute in the graph of a trace."""
        return rewrite(traced.graph, names, strict=True)

    def again(self, program: Program) -> Collection[str]:
        """The rewrites that show whether another case is the same."""
        return self.rewrites

    def check(self, traced: Traced) -> None:
        """Raise NotAnOp for a trace that is none of this kind."""

    def form_of(self, form: Any, traced: Traced, program: Program) -> Any:
        """What `Facts.form` is, of the first trace."""
        return None

    def options(self, program: Program) -> dict[str, Any]:
        """What the report says of the op."""
        return program.ops[0].options()

    @staticmethod
    def caller(facts: Facts, op: Step, i: int) -> Called:
        """The function that calls the i-th op of a program with its arguments."""
        return library.OPS[op.name].overload

    # What all kinds share.

    def plan(self) -> Plan:
        return Plan(self.title, self.model, self.look)

    def look(self, plan: Plan, name: str, module: nn.Module) -> None:
        if self.is_fused(name, module):
            return
        try:
            one = self.checked(module)
            facts = self.facts(one)
            facts.assumptions.check(one)
        except NotAnOp:
            if not self.is_expected(name, module):
                return
            raise
        op = facts.program.ops[0].name.removesuffix("_forward")
        plan.fuse(name, module, op, self.options(facts.program))
        plan.changes.append(lambda: self.install(module, facts))

    def facts(self, module: nn.Module) -> Facts:
        return self.probes.once(self.key(module), lambda: self.found(module))

    def install(self, module: nn.Module, facts: Facts) -> None:
        classes.override(module, self.name, facts)

    def key(self, module: nn.Module) -> Any:
        """Key of everything that a trace can depend on."""
        called = self.called(module)
        children = tuple(
            (name, *(_widths(child) if name in called else (leaf_key(child), _shapes(child))))
            for name, child in module._modules.items()
        )
        return classes.class_of(module), attributes_key(module), _shapes(module), children

    def found(self, module: nn.Module) -> Facts:
        """What replaces a module's code.

        Raises:
            NotAnOp: it computes no op, or more; the text gives the reason.
        """
        trace = ModuleTrace(module, self.called(module), self.method)
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
        first = self.case(module, form)
        traced = trace.run(first)
        program = final = self.program(traced, self.names(module))
        known = self.form_of(form, traced, program)
        dtypes = [(first.dtype, first.parameters)]
        for case in self.others(module, form, first):
            try:
                final = self.compare(trace, program, case)
            except FailsInTrace:
                if not case.may_fail:
                    raise
                continue
            dtypes.append((case.dtype, case.parameters))
        for cases in self.more(module, form, first):
            with contextlib.suppress(NotAnOp):
                for case in cases:
                    self.compare(trace, program, case)
                dtypes.append((cases[0].dtype, cases[0].parameters))
        return Facts(final, known, trace.reads.assumptions(module, dict.fromkeys(dtypes)))

    def compare(self, trace: ModuleTrace, program: Program, case: Case) -> Program:
        """The program of a case, which must be `program`, but for casts that do nothing there."""
        case = replace(case, shapes={name: case.shapes[name] for name in program.used})
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
        ops = self.ops or self.rewrites
        return written(traced, ops, self.functions, "kept").rounding_as(program)

    def program(
        self, traced: Traced, names: Collection[str], first: Program | None = None
    ) -> Program:
        """The program of a trace, and of a later one than the first."""
        y = traced.result
        if type(y) not in self.returns and not (Tensor in self.returns and isinstance(y, Tensor)):
            wanted = "a tensor" if Tensor in self.returns else "a tuple of tensors"
            raise NotAnOp(f"it returns {type(y).__name__}, not {wanted}")
        if not isinstance(y, Tensor) and not all(isinstance(one, Tensor) for one in y):
            raise NotAnOp("it returns tuples of others than tensors")
        self.check(traced)
        report = self.rewritten(traced, names)
        ops = self.ops or tuple(names)
        if not any(op_of(node) in ops for node in traced.graph.graph.nodes):
            reasons = [f"{one.op}: {one.reason}" for one in report.findings if not one.used]
            raise NotAnOp(reasons[0] if reasons else f"it computes {none_of(names)}")
        casts = "dropped" if self.casts else "refused"
        program = written(traced, ops, self.functions, casts)
        is_wide = traced.case.dtype in (torch.float32, torch.float64)
        return program.rounding_as(first) if first and is_wide else program


def _widths(child: Any) -> tuple[Any, ...]:
    """What a stand-in depends on."""
    has_state = any(True for _ in (*child.parameters(), *child.buffers()))
    return getattr(child, "in_features", None), getattr(child, "out_features", None), has_state


def _shapes(module: nn.Module | None) -> Any:
    own = {} if module is None else module._parameters
    return tuple(
        (name, None if one is None else (tuple(shape_of(one)), one.dtype))
        for name, one in own.items()
    )
