"""Measure how a model's results change when its graph is rewritten, or when `fuse` changed it.

The model runs on one batch, forward and backward: unchanged, changed, and unchanged with all
arithmetic in a wider dtype. The third run is the truth, with which both others are compared. What a
run changes, the model's buffers and the random number generators, is kept and restored.

A fused and an unfused model are also compared with each other, both in the wider dtype, where they
may differ by its rounding alone. A lost term shows there, even if the rounding of the model's dtype
would hide it. A wide run still rounds where the model casts to a dtype that is not its own, such as
float8, so that a lost cast shows too. What is rounded to the model's own dtype cannot show there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..torch_private import CompileWrapper
from . import rewrite
from .attention.runtime.padding import PADDING
from .differences import LOSS, OUTPUT, Verification, compared, magnified
from .engine.float64_graph import WiderArithmetic, default_dtype, dtypes_of, rounded_beside, widened
from .engine.graph_state import reached
from .engine.report import first_line


@contextlib.contextmanager
def state_kept(model: Any) -> Iterator[None]:
    """Restore, at the end of the context, a module's buffers and the random state.

    The random state is that of Python, NumPy, the CPU and the current device.
    """
    buffers = list(model.buffers()) if isinstance(model, torch.nn.Module) else []
    before = [buffer.detach().clone() for buffer in buffers]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
    device_type = "cuda" if accelerator is None else accelerator.type
    with _python_random_kept(), torch.random.fork_rng(devices, device_type=device_type):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)


@contextlib.contextmanager
def _python_random_kept() -> Iterator[None]:
    # NumPy too: models of speech draw the spans that SpecAugment masks with it.
    numpy: Any = sys.modules.get("numpy")
    python, arrays = random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        if arrays is not None:
            numpy.random.set_state(arrays)


def random_state() -> list[Tensor]:
    """Return the states of the random number generators of the CPU and the current device."""
    states = [torch.get_rng_state()]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        states.append(torch.get_device_module(accelerator).get_rng_state())
    return states


Run = Callable[..., Any]
Results = dict[str, Tensor]

# Functions of a module that return a context in which it is as it was before it was changed. The
# context yields how many of its parts are changed. `fuse` adds one.
UNCHANGED: list[Callable[[nn.Module], contextlib.AbstractContextManager[int]]] = []

# The dtypes of wide runs, tried in this order: not every model can compute in float64.
WIDER = (torch.float64, torch.float32)

RANDOM = "the model draws random numbers"

LOGITS = f"{OUTPUT}logits"


def verify(model: Run, args: Sequence[Any], kwargs: dict[str, Any]) -> Verification:
    """Measure what the rewrites, and `fuse` if it was called, change of a model on a batch."""
    runs = _CompiledRuns(model, args, kwargs)
    found = runs.compared()
    if not runs.changed_parts:
        return found
    try:
        if not isinstance(model, nn.Module):
            raise CannotVerify("explain was given a function, and not the module itself")
        return _with_wide(found, *_Eager(model, args, kwargs).wide_pair())
    except CannotVerify as reason:
        return replace(found, why_not_wide=str(reason))


def verify_changes(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Verification:
    """Measure what `fuse` changed of a model on a batch, eagerly, on copies of the model.

    Raises:
        CannotVerify: the model cannot be copied, or cannot run in a wider dtype; its loss is not
            finite; or only the changed model raises an exception.
    """
    return _Eager(model, args, kwargs).verified()


class CannotVerify(ValueError):
    """The changed and the unchanged model cannot be compared, for the reason given."""


@contextlib.contextmanager
def as_unchanged(modules: Iterable[nn.Module]) -> Iterator[int]:
    """Run the body with the modules as they were before they were changed.

    Yields how many of their parts are changed.
    """
    with contextlib.ExitStack() as stack:
        yield sum(stack.enter_context(undo(module)) for module in modules for undo in UNCHANGED)


class _CompiledRuns:
    """Compiled runs of one model on one batch."""

    def __init__(self, model: Run, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.is_random = False
        self.narrowest = torch.float64
        self.changed_parts = 0
        self.eager = CompileWrapper("aot_eager", None, None, dynamic=None)

    def compared(self) -> Verification:
        before, after = self.unchanged(self.eager), self.measured(self.rewritten)
        eps = torch.finfo(self.narrowest).eps
        why = RANDOM if self.is_random else "it is of float64"
        for dtype in () if self.is_random else WIDER:
            if not _is_wider(dtype, self.narrowest):
                continue
            try:
                truth = self.unchanged(functools.partial(widened, dtype))
                return Verification(compared(before, after, truth, eps), dtype)
            except Exception as error:
                why = f"in {dtype} {first_line(error)}"
        return Verification(compared(before, after, None, eps), None, why)

    def unchanged(self, backend: Run) -> Results:
        with as_unchanged(modules_of(self.model)) as self.changed_parts:
            return self.measured(backend)

    def measured(self, backend: Run) -> Results:
        torch.compiler.reset()
        with state_kept(self.model):
            random = random_state()
            compiled = torch.compile(self.model, backend=backend)
            results = _results(self.model, compiled, self.args, self.kwargs)
            self.is_random = not all(map(torch.equal, random, random_state()))
        return results

    def rewritten(self, module: fx.GraphModule, inputs: list[Any]) -> Run:
        found = [self.narrowest, *dtypes_of(module)]
        self.narrowest = min(found, key=lambda dtype: torch.finfo(dtype).bits)
        PADDING.assume(module, inputs)
        rewrite(module)
        return self.eager(module, inputs)


class _Eager:
    """Eager runs of a changed model and of the unchanged one on a batch, each on a new copy."""

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        _check_data(model)
        self.model, self.args, self.kwargs = model, args, kwargs
        floats = {x.dtype for x in self.model.parameters() if x.is_floating_point()}
        self.narrowest = min(floats or {torch.float32}, key=lambda dtype: torch.finfo(dtype).bits)
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.rounded = rounded_beside(floats | {x.dtype for x in inputs if x.is_floating_point()})
        self.is_random = False

    def verified(self) -> Verification:
        """Compare both models in their own dtype and in a wider one.

        The unchanged model in the wider dtype is the truth for the comparison in their own.
        """
        own, is_random = self.pair(None), self.is_random
        dtype, before, after = self.wide_pair()
        eps = torch.finfo(self.narrowest).eps
        if is_random:
            found = Verification(compared(*own, None, eps), None, RANDOM)
        else:
            found = Verification(compared(*own, before, eps), dtype)
        return _with_wide(found, dtype, before, after)

    def wide_pair(self) -> tuple[torch.dtype, Results, Results]:
        """Return the first wider dtype in which both models run, and their results in it."""
        why = ""
        for dtype in WIDER:
            if _is_wider(dtype, self.narrowest) or dtype is torch.float64:
                try:
                    return dtype, *self.pair(dtype)
                except CannotVerify as error:
                    why = why or f"in {dtype} {error}"
                except Exception as error:
                    why = why or f"in {dtype} {first_line(error)}"
        raise CannotVerify(why)

    def pair(self, dtype: torch.dtype | None) -> tuple[Results, Results]:
        """Return the results of the unchanged and the changed model that both should have."""
        before = self.results(dtype, unchanged=True)
        if not before[LOSS].isfinite():
            raise CannotVerify("the loss of the unchanged model on this batch is not finite")
        try:
            after = self.results(dtype)
        except Exception as error:
            why = f"the changed model raises, and the unchanged one does not: {first_line(error)}"
            raise CannotVerify(why) from error
        for name in _skipped(before, after):
            before.pop(name, None)
            after.pop(name, None)
        return before, after

    def results(self, dtype: torch.dtype | None, unchanged: bool = False) -> Results:
        """Return the loss, the outputs, and the gradients of parameters and inputs."""
        args, kwargs = pytree.tree_map(lambda x: _leaf(x, dtype), (self.args, self.kwargs))
        model = _copy(self.model)
        with contextlib.ExitStack() as stack:
            if dtype is not None:
                _widen(model, dtype)
                stack.enter_context(default_dtype(dtype))
                stack.enter_context(WiderArithmetic(dtype, self.rounded))
            if unchanged:
                stack.enter_context(as_unchanged([model]))
            stack.enter_context(state_kept(model))
            stack.enter_context(torch.enable_grad())
            random = random_state()
            output = model(*args, **kwargs)
            loss = loss_of(output)
            loss.backward()
            self.is_random = not all(map(torch.equal, random, random_state()))
            leaves = {f"argument {key}": x for key, x in [*enumerate(args), *kwargs.items()]}
            leaves.update(model.named_parameters())
        gradients = {name: getattr(leaf, "grad", None) for name, leaf in leaves.items()}
        found = {LOSS: loss.detach(), **dict(_outputs(output, OUTPUT))}
        return found | {name: dx for name, dx in gradients.items() if dx is not None}


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _with_wide(
    found: Verification, dtype: torch.dtype, before: Results, after: Results
) -> Verification:
    """Add the differences of wide runs, which the rounding of a narrow dtype cannot hide.

    Given these, the gradients in the model's own dtype need not be compared one by one, where luck
    decides which of two is nearer to the truth. Each is allowed the unchanged model's largest
    error.
    """
    wide = compared(before, after, None, torch.finfo(dtype).eps, magnified(found.differences))
    own = [d.own_error or 0.0 for d in found.differences if d.is_gradient]
    largest = max(own, default=0.0)
    pooled = tuple(
        replace(d, own_error=largest) if d.own_error is not None and d.is_gradient else d
        for d in found.differences
    )
    return replace(found, differences=pooled, wide=wide, wide_dtype=dtype)


def _check_data(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise CannotVerify(f"{name} is on the meta device, without data")
        if type(parameter).__name__ == "DTensor" or hasattr(parameter, "ds_shape"):
            raise CannotVerify(f"{name} is sharded; a model can be compared before it is sharded")


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise CannotVerify(f"the model cannot be copied: {first_line(error)}") from error


def _widen(model: nn.Module, dtype: torch.dtype) -> None:
    model.double() if dtype is torch.float64 else model.float()
    module: Any
    for module in model.modules():
        # A checkpoint would recompute in the backward, where WiderArithmetic does not reach. The
        # models of transformers and diffusers have this function beside a flag, which stays as it
        # is because they also read it to make no cache.
        if "_gradient_checkpointing_func" in vars(module):
            module._gradient_checkpointing_func = _called


def _leaf(x: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().to(dtype or x.dtype, copy=True).requires_grad_(x.requires_grad)


def _outputs(output: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors of an output except for its loss, by name or index."""
    if isinstance(output, Tensor) and output.is_floating_point():
        yield name, output.detach()
    elif isinstance(output, (Mapping, tuple, list)):
        items = output.items() if isinstance(output, Mapping) else enumerate(output)
        for key, item in items:
            if key != LOSS:
                yield from _outputs(item, f"{name}{'' if name == OUTPUT else '.'}{key}")


def _skipped(before: Results, after: Results) -> set[str]:
    """Return the outputs that a fused model may leave out: the logits.

    The outputs of a tuple have no names. If the models return different numbers of them, none is
    compared.
    """
    in_tuple = [
        {name for name in results if name.startswith(OUTPUT) and name[len(OUTPUT)].isdigit()}
        for results in (before, after)
    ]
    unnamed = in_tuple[0] | in_tuple[1] if in_tuple[0] != in_tuple[1] else set()
    return unnamed if LOGITS in after else unnamed | {LOGITS}


def _is_wider(dtype: torch.dtype, other: torch.dtype) -> bool:
    return torch.finfo(dtype).bits > torch.finfo(other).bits


def _results(
    model: Run, run: Run, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """Return the loss, and its gradient for every leaf that it depends on."""
    with torch.enable_grad():
        loss = loss_of(run(*args, **kwargs))
    names = _names(model, args, kwargs)
    leaves = {names.get(id(leaf), f"leaf {i}"): leaf for i, leaf in enumerate(_leaves(loss))}
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {LOSS: loss.detach()}
    found.update({name: dx for name, dx in zip(leaves, gradients, strict=True) if dx is not None})
    return found


def loss_of(output: Any) -> Tensor:
    """Return the loss of a model's output.

    It is the output's `loss`; or else the output itself, or the first of a tuple, if that is a
    scalar; or else a weighted sum of the output's tensors.
    """
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if isinstance(output, tuple) and tensors and tensors[0] is output[0] and not tensors[0].dim():
        return tensors[0]
    if not tensors:
        raise ValueError("verify needs an output with a gradient, and there is none")
    if len(tensors) == 1 and tensors[0].dim() == 0:
        return tensors[0]
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    # The weights differ, because a plain sum would not notice elements that are exchanged.
    for x in tensors:
        steps = torch.arange(x.numel(), device=x.device, dtype=torch.float64)
        total = total + (x.double() * torch.sin(1 + steps).reshape(x.shape)).sum().to(total.device)
    return total


def _leaves(loss: Tensor) -> list[Tensor]:
    functions = reached(
        [loss.grad_fn], lambda function: (f for f, _ in getattr(function, "next_functions", ()))
    )
    variables = (getattr(function, "variable", None) for function in functions)
    return list({id(x): x for x in variables if isinstance(x, Tensor)}.values())


def _names(model: Run, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[int, str]:
    """Return names for leaves, by id: parameters as in the module, arguments as in the call."""
    names = {id(p): name for module in modules_of(model) for name, p in module.named_parameters()}
    return {**names, **{id(x): f"argument {key}" for key, x in [*enumerate(args), *kwargs.items()]}}


def modules_of(function: Any) -> list[nn.Module]:
    """Return a module itself, or the modules in a function's closure or globals."""
    if isinstance(function, nn.Module):
        return [function]
    function = getattr(function, "__func__", function)
    if not inspect.isfunction(function):
        return []
    variables = inspect.getclosurevars(function)
    return [
        variable
        for variable in (*variables.nonlocals.values(), *variables.globals.values())
        if isinstance(variable, nn.Module)
    ]
