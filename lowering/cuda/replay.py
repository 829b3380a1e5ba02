"""Replay an earlier call of an op for arguments of the same form.

A call's checks, plan, allocations and launches depend on its form alone: shapes, strides, dtypes
and alignment of tensors, options, and PyTorch's precision of float32 products. The first call of a
form runs as it is, the second is recorded, and later ones allocate the same memory and launch the
same compiled kernels, with their own addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...torch_private import BelowAutograd, TorchDispatchMode, empty_strided_cuda
from .compiled import ALIGNMENT, MOST_COMPILED, Compiled, can_replay, current_stream, thread

ALLOCATIONS = {
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}
# Bytes of what a call may compute by PyTorch: a replay has all of it in memory until it ends.
MOST_COMPUTED = 2**20
# Operators whose results have another form, or are other numbers, in the next call.
DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


# A step is given the tensors of the call that is replayed, of which the call's arguments are the
# first, their addresses, and the stream. `index` is that of one of these tensors.


class Allocation(NamedTuple):
    """Memory for a result, or for use within the call."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def run(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        x = empty_strided_cuda(*self)
        tensors.append(x)
        addresses.append(x.data_ptr())


class Given(NamedTuple):
    """An argument of a computation that is a tensor or, with size, stride and start, its part."""

    argument: int | str
    index: int
    part: tuple[Any, ...] | None


class Computation(NamedTuple):
    """An operator of PyTorch."""

    function: Any
    args: list[Any]
    options: dict[str, Any]
    given: list[Given]

    def run(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        args, options = self.args.copy(), self.options.copy()
        for i, index, part in self.given:
            x = tensors[index]
            if part is not None:
                size, stride, start = part
                x = x.as_strided(size, stride, x.storage_offset() + start)
            (options if isinstance(i, str) else args)[i] = x
        x = self.function(*args, **options)
        tensors.append(x)
        addresses.append(x.data_ptr())


class Launch(NamedTuple):
    """A compiled kernel; `places` are the indices of arguments that are addresses, the indices of
    their tensors, and the bytes between a tensor's start and the address. `hooks` are Triton's.
    The code is loaded while `kernel` lives: Triton 3.8 and later unload it with the kernel."""

    kernel: Any
    hooks: list[Any]
    launch: Callable[[Sequence[Any], int], None]
    args: list[Any]
    places: list[tuple[int, int, int]]

    def run(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        args = self.args.copy()
        for i, index, offset in self.places:
            args[i] = addresses[index] + offset
        self.launch(tuple(args), stream)


class Recording(NamedTuple):
    """A call's steps, and which of its tensors are its results; and the hooks of its kernels."""

    device: int
    steps: list[Allocation | Computation | Launch]
    hooks: list[list[Any]]
    computes: bool
    results: list[int | None]
    is_tuple: bool

    def replay(self, tensors: list[Any], addresses: list[int]) -> Any:
        if self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self.replay(tensors, addresses)
        stream = current_stream(self.device)
        with BelowAutograd() if self.computes else nullcontext():
            for step in self.steps:
                step.run(tensors, addresses, stream)
        results = [None if i is None else tensors[i] for i in self.results]
        return tuple(results) if self.is_tuple else results[0]


class Recorder(TorchDispatchMode):
    """Records a call, which is to be made with `args` in place of its own arguments."""

    def __init__(self, args: Sequence[Any], tensors: Sequence[int]) -> None:
        super().__init__()
        # An argument that is given twice is two objects here.
        self.args = [x.detach() if isinstance(x, Tensor) else x for x in args]
        self.tensors = [self.args[i] if i < len(args) else None for i in tensors]
        self.count = len(self.tensors)
        # By the id of a tensor or a view of one: it, and the tensor's index.
        self.found = {id(x): (x, i) for i, x in enumerate(self.tensors) if x is not None}
        self.steps: list[Allocation | Computation | Launch] = []
        # Index of a tensor that is no argument -> index of the step that makes it.
        self.made: dict[int, int] = {}
        self.is_exact, self.computed = True, 0

    def __enter__(self) -> Recorder:
        thread.recorder = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        thread.recorder = None
        super().__exit__(*exception)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.is_exact and not self._called(function, args, kwargs or {}, result):
            self.stop()
        return result

    def stop(self) -> None:
        """The call cannot be replayed. From now on it frees its memory as it does otherwise."""
        self.is_exact = False
        self.tensors.clear()
        self.found.clear()

    def _called(self, function: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Note what an operator of PyTorch did, and return whether it can be repeated."""
        given = {**dict(enumerate(args)), **kwargs}
        given = {i: x for i, x in given.items() if isinstance(x, Tensor)}
        results = [result] if isinstance(result, Tensor) else result
        if function.is_view and all(_memory(x) == _memory(args[0]) for x in results):
            index = self._index(args[0])
            self.found.update({id(x): (x, index) for x in results})
            return index is not None
        if not isinstance(result, Tensor):
            # What is computed without tensors depends on the form alone.
            return not given
        step: Any = _form(result)
        if function._schema.name not in ALLOCATIONS:
            found = [self._given(i, x) for i, x in given.items()]
            self.computed += result.nbytes
            if None in found or self.computed > MOST_COMPUTED or not _is_exact(function):
                return False
            # The recording keeps no tensor alive.
            values = [None if i in given else x for i, x in enumerate(args)]
            options = {name: None if name in given else x for name, x in kwargs.items()}
            step = Computation(function, values, options, found)
        index = len(self.tensors)
        self.found[id(result)] = result, index
        self.made[index] = len(self.steps)
        self.tensors.append(result)
        self.steps.append(step)
        return True

    def _given(self, argument: int | str, x: Tensor) -> Given | None:
        index = self._index(x)
        tensor = x if index is None else self.tensors[index]
        if index is None or x.dtype is not tensor.dtype:
            return None
        part = (tuple(x.shape), x.stride(), x.storage_offset() - tensor.storage_offset())
        return Given(argument, index, None if _form(x) == _form(tensor) else part)

    def _index(self, x: Tensor) -> int | None:
        return self.found.get(id(x), (x, None))[1]

    def launched(self, kernel: Any, compiled: Compiled, args: Sequence[Any]) -> None:
        """Note a launch."""
        passed, places = [*args, *compiled.constants], []
        for i, x in enumerate(args):
            if isinstance(x, Tensor):
                passed[i], index = x.data_ptr(), self._index(x)
                if index is None:
                    self.stop()
                    return
                if x.numel():
                    places.append((i, index, passed[i] - self.tensors[index].data_ptr()))
        launch, taken = compiled.by_pytorch() or (compiled.launch, None)
        if taken is not None:
            position = {i: n for n, i in enumerate(taken)}
            passed = [*(passed[i] for i in taken), None, None]
            places = [(position[i], *place) for i, *place in places]
        step = Launch(compiled.kernel, kernel.pre_run_hooks, launch, passed, places)
        self.steps.append(step)

    def recording(self, returned: Any) -> Recording | None:
        """The call, which returned this, or None if it cannot be replayed."""
        if not self.is_exact:
            return None
        computes = any(isinstance(step, Computation) for step in self.steps)
        results: list[int | None] = []
        for x in returned if isinstance(returned, tuple) else (returned,):
            index = None if x is None else self._index(x)
            if x is not None:
                if index not in self.made or index in results:
                    return None
                tensor = self.tensors[index]
                if _form(x) != _form(tensor):
                    # The memory has the result's strides from the start.
                    if computes or not _is_whole(x, tensor):
                        return None
                    self.steps[self.made[index]] = _form(x)
            results.append(index)
        devices = {x.get_device() for x in self.tensors if x is not None}
        hooks = [step.hooks for step in self.steps if isinstance(step, Launch)]
        if len(devices) != 1 or not (hooks or computes):
            return None
        is_tuple = isinstance(returned, tuple)
        return Recording(devices.pop(), self.steps, hooks, computes, results, is_tuple)


def _form(x: Tensor) -> Allocation:
    return Allocation(tuple(x.shape), x.stride(), x.dtype)


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _is_exact(function: Any) -> bool:
    """Whether an operator takes no list of tensors, and returns the same forms in each call."""
    kinds = [str(argument.type) for argument in function._schema.arguments]
    takes_list = any("List" in kind and "Tensor" in kind for kind in kinds)
    return not (takes_list or DATA_DEPENDENT & set(function.tags))


def _is_whole(x: Tensor, tensor: Tensor) -> bool:
    """Whether x has all memory of the tensor, and no element twice."""
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    is_dense = x.numel() in (0, last + 1)
    return is_dense and x.nbytes == tensor.nbytes and x.data_ptr() == tensor.data_ptr()


class Replays:
    """The kernel of an op, which is given the arguments as a tuple: `run`, or a recorded call."""

    def __init__(self, run: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self.run = run
        kinds = [str(argument.type) for argument in arguments]
        self.tensors = [i for i, kind in enumerate(kinds) if kind in ("Tensor", "Optional[Tensor]")]
        self.lists = [i for i, kind in enumerate(kinds) if "List" in kind]
        # The form of a call -> its recording, or whether its next call is to be recorded.
        self.known: dict[tuple[Any, ...], Recording | bool] = {}

    def __call__(self, args: tuple[Any, ...]) -> Any:
        if not can_replay():
            return self.run(*args)
        form, tensors, addresses = self._form(args)
        known = self.known.get(form)
        if isinstance(known, Recording):
            if not any(known.hooks):
                return known.replay(tensors, addresses)
        elif known:
            with Recorder(args, self.tensors) as recorder:
                results = self.run(*recorder.args)
            self.known[form] = recorder.recording(results) or False
            return results
        results = self.run(*args)
        if known is None:
            if len(self.known) >= MOST_COMPILED:
                self.known.clear()
            self.known[form] = True
        return results

    def _form(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any], list[int]]:
        """What a call depends on but the numbers in its tensors; these, and their addresses."""
        form, tensors, addresses, count = [*args], [], [], len(args)
        for i in self.tensors:
            x, address = args[i] if i < count else None, 0
            if x is not None:
                address = x.data_ptr()
                form[i] = x.shape, x.stride(), x.dtype, x.get_device(), address % ALIGNMENT
            tensors.append(x)
            addresses.append(address)
        for i in self.lists:
            if i < count and form[i] is not None:
                form[i] = tuple(form[i])
        # Kernels with products read this setting.
        form.append(torch.get_float32_matmul_precision())
        return tuple(form), tensors, addresses
