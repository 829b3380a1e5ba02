"""Recognise the op of a norm with the patterns of the backend's rewrites."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...rewrites.engine.recognise import Recognised, recognise
from ...rewrites.engine.rewrite import Refused, before_widening
from .. import classes
from ..assumptions import Assumptions, Reads
from ..probing import NotAnOp, dtype_name, first_line, own_attributes
from ..trace import ANY_SIZES, Trace

REWRITES = ("rms_norm", "layer_norm", "group_norm")
# Of a module that is called with a gate too.
GATED_REWRITES = ("gated_rms_norm",)

# Widths for modules without parameters. A norm over rows of both widths has no width of its own.
ANY_WIDTHS = (40, 56)

# The dtypes of an input and of the parameters.
Dtypes = tuple[torch.dtype, torch.dtype]


@dataclass(frozen=True)
class Norm:
    """An op, by name, and the options with which it computes what a module computes.

    width is the size of the dimension of the parameters, or None for a module without parameters
    that takes any width.
    """

    op: str
    options: dict[str, Any]
    width: int | None

    def __str__(self) -> str:
        return (
            f"{self.op}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"
        )

    def computed_by(
        self, function: Callable[..., Any], inputs: Sequence[Tensor],
        weight: Tensor | None, bias: Tensor | None,
    ) -> Any:  # fmt: skip
        """Call the op, or another function with its arguments, on x, a gate if it has one, and the
        parameters."""
        tensors = {"weight": weight}
        if self.op in ("layer_norm", "group_norm"):
            tensors["bias"] = bias
        return function(*inputs, **tensors, **self.options)


@dataclass(frozen=True)
class _Case:
    """How a norm is called in a trace: channels last, or channels before `dims` - 2 dimensions."""

    width: int
    channels_last: bool
    dims: int = 3
    dtypes: Dtypes = (torch.bfloat16, torch.bfloat16)
    training: bool = True

    def shape(self) -> tuple[int, ...]:
        leading = tuple(ANY_SIZES[n] for n in {2: (4,), 3: (2, 3), 4: (5, 4, 2)}[self.dims])
        return (
            (*leading, self.width) if self.channels_last else (leading[0], self.width, *leading[1:])
        )

    def __str__(self) -> str:
        x, parameters = map(dtype_name, self.dtypes)
        mode = "training" if self.training else "evaluation"
        dtypes = x if x == parameters else f"{x}, parameters {parameters}"
        return f"{dtypes}, {self.dims} dimensions, {mode}"


class _FailsInTrace(NotAnOp):
    """The code does not accept such an input."""


def norm_of(module: nn.Module, mixed_dtypes: Sequence[Dtypes] = ()) -> tuple[Norm, Assumptions]:
    """Find the op that computes what a module computes, and what that assumes of the module.

    The module's parameters, at most a weight and a bias, are one-dimensional and of one size. Its
    forward is traced in bfloat16, where the positions of rounding show. It must be the same op for
    inputs of two, three and four dimensions, in training and in evaluation, in float16, in float32
    and for `mixed_dtypes`, pairs of an input's dtype and the parameters' dtype.

    Raises:
        NotAnOp: it is not an op; the text gives the reason.
    """
    return _Norm(module).found(mixed_dtypes)


class _Norm:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.is_gated = len(inspect.signature(module.forward).parameters) == 2
        self.parameters = {name: p for name, p in module._parameters.items() if p is not None}
        self.reads = Reads()

    def found(self, mixed_dtypes: Sequence[Dtypes]) -> tuple[Norm, Assumptions]:
        refusals = []
        for case in self.cases():
            try:
                norm = self.traced(case)
                if (norm.op != "group_norm") is not case.channels_last:
                    raise NotAnOp(f"it is {norm.op} of inputs of another layout")
                dtypes = self.verified(norm, case, mixed_dtypes)
                return norm, self.reads.assumptions(self.module, dtypes)
            except NotAnOp as refusal:
                refusals.append(refusal)
        # A refusal of a case that runs says more than the failure of one that does not.
        raise min(refusals, key=lambda refusal: isinstance(refusal, _FailsInTrace))

    def cases(self) -> Iterator[_Case]:
        sizes = self.sizes()
        if self.parameters:
            own = next(iter(self.parameters.values())).numel()
            yield _Case(own, True)
            yield _Case(own, False)
            return
        for width in (ANY_WIDTHS[0], *sizes):
            yield _Case(width, True)
        for width in sorted(sizes, reverse=True):
            yield _Case(width, False)

    def sizes(self) -> list[int]:
        """Possible widths among the attributes of a module: ints, and tuples of one int."""
        found: dict[int, None] = {}
        for value in own_attributes(self.module).values():
            if isinstance(value, (tuple, list)) and len(value) == 1:
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**20:
                found[value] = None
        return list(found)

    def verified(self, norm: Norm, first: _Case, mixed_dtypes: Sequence[Dtypes]) -> list[Dtypes]:
        """The dtypes in which the module is the op. Raises NotAnOp if it is not in another case."""
        half, single = (torch.float16, torch.float16), (torch.float32, torch.float32)
        cases = [
            replace(first, dims=2, training=False),
            replace(first, dims=4, dtypes=half),
            replace(first, dtypes=single),
        ]
        if norm.width is None:
            cases.append(replace(first, width=ANY_WIDTHS[1]))
        for case in cases:
            self.compare(norm, case)
        proved = [first.dtypes, half, single]
        for dtypes in mixed_dtypes if self.parameters else ():
            # A pair of dtypes on which the module fails cannot occur in the model.
            with contextlib.suppress(_FailsInTrace):
                self.compare(norm, replace(first, dtypes=dtypes))
                proved.append(dtypes)
        wide = (torch.float64, torch.float64)
        # In float64 much code rounds to float32, and is no op.
        with contextlib.suppress(NotAnOp):
            for training in (True, False):
                self.compare(norm, replace(first, dtypes=wide, training=training))
            proved.append(wide)
        return proved

    def compare(self, norm: Norm, case: _Case) -> None:
        try:
            found = self.traced(case, (norm.op,))
        except _FailsInTrace:
            raise
        except NotAnOp as reason:
            raise NotAnOp(f"{reason} ({case})") from None
        options = dict(found.options)
        if "casting_mode" in options and case.dtypes[0] in (torch.float32, torch.float64):
            # In these nothing is rounded in between, so all casting modes are equal.
            options["casting_mode"] = norm.options.get("casting_mode")
        if (found.op, options) != (norm.op, norm.options):
            raise NotAnOp(f"it is {norm} once, and {found} in another case ({case})")

    def traced(self, case: _Case, rewrites: Sequence[str] | None = None) -> Norm:
        trace = Trace()
        x = trace.input("x", case.shape(), case.dtypes[0])
        inputs = [x]
        if self.is_gated:
            inputs.append(trace.input("gate", case.shape(), case.dtypes[0]))
        parameters = {
            name: trace.input(name, (case.width,), case.dtypes[1]) for name in self.parameters
        }
        module = self.copied(parameters).train(case.training)
        before = own_attributes(module)
        try:
            with self.reads.of(module), trace.running():
                # `forward` is called directly, because a call of the module would run its hooks.
                y = module.forward(*inputs)
        except NotAnOp:
            raise
        except Exception as error:
            raise _FailsInTrace(f"it fails on fake tensors ({case}): {first_line(error)}") from None
        if list(map(id, before.values())) != list(map(id, own_attributes(module).values())):
            raise NotAnOp("its forward changes its attributes")
        self.check_result(x, y, case)
        try:
            usual = GATED_REWRITES if self.is_gated else REWRITES
            found = recognise(trace.module(y), rewrites or usual)
        except Refused as reason:
            raise NotAnOp(str(reason)) from None
        return self.norm(found, case)

    def check_result(self, x: Tensor, y: Any, case: _Case) -> None:
        if not isinstance(y, Tensor):
            raise NotAnOp(f"it returns {type(y).__name__}, not a tensor")
        if y.shape != x.shape:
            raise NotAnOp(f"it returns shape {tuple(y.shape)} for an input of {tuple(x.shape)}")
        if y.dtype is not x.dtype:
            raise NotAnOp(
                f"it returns {dtype_name(y.dtype)} for input of {dtype_name(x.dtype)} and"
                f" parameters of {dtype_name(case.dtypes[1])}; the ops keep the input's dtype"
            )

    def norm(self, found: Recognised, case: _Case) -> Norm:
        """The op, if its inputs are the module's own input and parameters, unmodified."""
        options = dict(found.arguments)
        inputs = ("x", "gate") if self.is_gated else ("x",)
        for name in (*inputs, "weight", "bias"):
            given = options.pop(name, None)
            if name not in inputs and options.get("casting_mode", "gemma") == "gemma":
                given = before_widening(given)
            wanted = name if name in inputs or name in self.parameters else None
            if given is None and wanted is None:
                continue
            if getattr(given, "op", None) != "placeholder" or given.target != wanted:
                raise NotAnOp(f"it is {found.op}, and of another {name} than its own")
        if "weight" not in self.parameters and options.get("casting_mode") == "gemma":
            # Without a weight to multiply by the two modes are equal.
            options["casting_mode"] = "llama"
        has_width = self.parameters or case.width != ANY_WIDTHS[0] or not case.channels_last
        return Norm(found.op, options, case.width if has_width else None)

    def copied(self, parameters: dict[str, Tensor]) -> nn.Module:
        """A copy of the module with these parameters, and without hooks."""
        copied: nn.Module = object.__new__(classes.class_of(self.module))
        try:
            attributes = copy.deepcopy(own_attributes(self.module))
        except Exception as error:
            raise NotAnOp(f"it cannot be copied: {first_line(error)}") from None
        every = {**self.module._parameters, **parameters}
        vars(copied).update(vars(self.module), **attributes, _parameters=every)
        return copied
