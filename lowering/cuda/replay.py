"""Replay an earlier call of an op for arguments of the same form.

A call's checks, plan, allocations and launches depend on its *form* alone: shapes, strides, dtypes
and alignment of tensors, options, and PyTorch's precision of float32 products. The first call of a
form runs as it is, the second is recorded, and later ones allocate the same memory and launch the
same compiled kernels, with their own addresses. A call that does anything that cannot be repeated
in this way is never replayed: it always runs its host code.
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
# The most bytes that a call may compute by operators of PyTorch: a replay keeps all of them in
# memory until it ends.
MOST_COMPUTED = 2**20
# Operators whose results have another shape, or are numbers of Python, that depend on the data.
DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


# The tensors of a call are numbered: first its arguments, then what its steps allocate or compute,
# in order. A replay runs each step with the list of the tensors so far, to which a step appends its
# result, the list of their addresses, and the stream. `index` is a tensor's number.


class Allocation(NamedTuple):
    """A step that allocates memory, for a result or for use within the call."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def run(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        x = empty_strided_cuda(*self)
        tensors.append(x)
        addresses.append(x.data_ptr())


class TensorArgument(NamedTuple):
    """The argument of a computation, by position or name, that is tensor `index` of the call.

    `view` is None for the tensor itself, or a view's size, stride, and start in the tensor.
    """

    argument: int | str
    index: int
    view: tuple[Any, ...] | None


class Computation(NamedTuple):
    """A step that calls an operator of PyTorch. `args` and `options` have None for each of the
    `tensor_arguments`."""

    function: Any
    args: list[Any]
    options: dict[str, Any]
    tensor_arguments: list[TensorArgument]

    def run(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        args, options = self.args.copy(), self.options.copy()
        for i, index, view in self.tensor_arguments:
            x = tensors[index]
            if view is not None:
                size, stride, start = view
                x = x.as_strided(size, stride, x.storage_offset() + start)
            (options if isinstance(i, str) else args)[i] = x
        x = self.function(*args, **options)
        tensors.append(x)
        addresses.append(x.data_ptr())


class Launch(NamedTuple):
    """A step that launches a compiled kernel.

    `pointers` has, for each argument that is an address, the argument's position, the index of its
    tensor, and the bytes from the tensor's start to the address. `hooks` are the kernel's hooks, a
    list that Triton changes in place. The recording holds `kernel`, because Triton 3.8 and later
    unload a kernel's code when the kernel is freed.
    """

    kernel: Any
    hooks: list[Any]
    launch: Callable[[Sequence[Any], int], None]
    args: list[Any]
    pointers: list[tuple[int, int, int]]

    def run(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        args = self.args.copy()
        for i, index, offset in self.pointers:
            args[i] = addresses[index] + offset
        self.launch(tuple(args), stream)


class Recording(NamedTuple):
    """The steps of a call, the indices of the tensors that are its results, and the hooks of its
    kernels. `computes`: one of the steps is a computation."""

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
    """Records a call, which is to be made with `args` in place of its own arguments.

    `tensors` are the positions of the arguments that may be tensors.
    """

    def __init__(self, args: Sequence[Any], tensors: Sequence[int]) -> None:
        super().__init__()
        # An argument that is passed twice is two objects here, so that each has its own index: in
        # a later call of the same form the two may be different tensors.
        self.args = [x.detach() if isinstance(x, Tensor) else x for x in args]
        self.tensors = [self.args[i] if i < len(args) else None for i in tensors]
        self.count = len(self.tensors)
        # The id of a tensor, or of a view of a tensor -> itself and the tensor's index. Holding the
        # object keeps its id from being given to another.
        self.indices = {id(x): (x, i) for i, x in enumerate(self.tensors) if x is not None}
        self.steps: list[Allocation | Computation | Launch] = []
        # Index of a tensor that is no argument -> index of the step that makes it.
        self.step_of: dict[int, int] = {}
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
        if self.is_exact and not self._record_operator(function, args, kwargs or {}, result):
            self.stop()
        return result

    def stop(self) -> None:
        """Give up: the call cannot be replayed. From now on it frees its memory as it does without
        a recorder."""
        self.is_exact = False
        self.tensors.clear()
        self.indices.clear()

    def _record_operator(self, function: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Record a call of an operator of PyTorch, and return whether it can be repeated."""
        inputs = {**dict(enumerate(args)), **kwargs}
        inputs = {i: x for i, x in inputs.items() if isinstance(x, Tensor)}
        results = [result] if isinstance(result, Tensor) else result
        # A view is no step: it belongs to its tensor, and a launch passes its offset from that. An
        # operator with the schema of a view may copy, hence the comparison of memory.
        if function.is_view and all(_memory(x) == _memory(args[0]) for x in results):
            index = self._index(args[0])
            self.indices.update({id(x): (x, index) for x in results})
            return index is not None
        if not isinstance(result, Tensor):
            # What is computed without tensors depends on the form alone.
            return not inputs
        step: Any = _allocation(result)
        if function._schema.name not in ALLOCATIONS:
            tensors = [self._tensor_argument(i, x) for i, x in inputs.items()]
            self.computed += result.nbytes
            if None in tensors or self.computed > MOST_COMPUTED or not _is_exact(function):
                return False
            # The recording keeps no tensor alive.
            values = [None if i in inputs else x for i, x in enumerate(args)]
            options = {name: None if name in inputs else x for name, x in kwargs.items()}
            step = Computation(function, values, options, tensors)
        index = len(self.tensors)
        self.indices[id(result)] = result, index
        self.step_of[index] = len(self.steps)
        self.tensors.append(result)
        self.steps.append(step)
        return True

    def _tensor_argument(self, argument: int | str, x: Tensor) -> TensorArgument | None:
        """Return x as an argument of a computation, or None if a replay could not make it."""
        index = self._index(x)
        tensor = x if index is None else self.tensors[index]
        # as_strided cannot make a view of another dtype.
        if index is None or x.dtype is not tensor.dtype:
            return None
        view = (tuple(x.shape), x.stride(), x.storage_offset() - tensor.storage_offset())
        return TensorArgument(
            argument, index, None if _allocation(x) == _allocation(tensor) else view
        )

    def _index(self, x: Tensor) -> int | None:
        """Return the index of the tensor that x is or is a view of; None if it is unknown."""
        return self.indices.get(id(x), (x, None))[1]

    def record_launch(self, kernel: Any, compiled: Compiled, args: Sequence[Any]) -> None:
        passed, pointers = [*args, *compiled.constants], []
        for i, x in enumerate(args):
            if isinstance(x, Tensor):
                passed[i], index = x.data_ptr(), self._index(x)
                if index is None:
                    self.stop()
                    return
                # The address of a tensor without elements is 0 in every call.
                if x.numel():
                    pointers.append((i, index, passed[i] - self.tensors[index].data_ptr()))
        launch, taken = compiled.by_pytorch() or (compiled.launch, None)
        if taken is not None:
            # PyTorch's launcher takes no constants: the positions are those among what it takes,
            # and the two pointers to Triton's scratch memory follow.
            position = {i: n for n, i in enumerate(taken)}
            passed = [*(passed[i] for i in taken), None, None]
            pointers = [(position[i], *pointer) for i, *pointer in pointers]
        step = Launch(compiled.kernel, kernel.pre_run_hooks, launch, passed, pointers)
        self.steps.append(step)

    def recording(self, returned: Any) -> Recording | None:
        """Return the recording of the call, which returned `returned`, or None if the call cannot
        be replayed."""
        if not self.is_exact:
            return None
        computes = any(isinstance(step, Computation) for step in self.steps)
        results: list[int | None] = []
        for x in returned if isinstance(returned, tuple) else (returned,):
            index = None if x is None else self._index(x)
            if x is not None:
                # A result that is an argument, or one tensor twice, is left to the host code.
                if index not in self.step_of or index in results:
                    return None
                tensor = self.tensors[index]
                if _allocation(x) != _allocation(tensor):
                    # The result is a view: a replay allocates memory with the view's shape and
                    # strides from the start. A computation would see the changed tensor.
                    if computes or not _is_whole(x, tensor):
                        return None
                    self.steps[self.step_of[index]] = _allocation(x)
            results.append(index)
        devices = {x.get_device() for x in self.tensors if x is not None}
        hooks = [step.hooks for step in self.steps if isinstance(step, Launch)]
        if len(devices) != 1 or not (hooks or computes):
            return None
        is_tuple = isinstance(returned, tuple)
        return Recording(devices.pop(), self.steps, hooks, computes, results, is_tuple)


def _allocation(x: Tensor) -> Allocation:
    """Return the step that allocates a tensor like x."""
    return Allocation(tuple(x.shape), x.stride(), x.dtype)


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _is_exact(function: Any) -> bool:
    """Return whether an operator takes no list of tensors, and its results have the same shapes in
    each call of a form."""
    types = [str(argument.type) for argument in function._schema.arguments]
    takes_list = any("List" in name and "Tensor" in name for name in types)
    return not (takes_list or DATA_DEPENDENT & set(function.tags))


def _is_whole(x: Tensor, tensor: Tensor) -> bool:
    """Return whether the view x covers all memory of the tensor, and no element twice."""
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    is_dense = x.numel() in (0, last + 1)
    return is_dense and x.nbytes == tensor.nbytes and x.data_ptr() == tensor.data_ptr()


class Replays:
    """The kernel of an op, called with the arguments as a tuple: it calls `run`, the host code, or
    replays a recorded call."""

    def __init__(self, run: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self.run = run
        types = [str(argument.type) for argument in arguments]
        self.tensors = [i for i, name in enumerate(types) if name in ("Tensor", "Optional[Tensor]")]
        self.lists = [i for i, name in enumerate(types) if "List" in name]
        # The form of a call -> its recording; True if the next call is to be recorded, and False if
        # a call of the form cannot be replayed.
        self.recordings: dict[tuple[Any, ...], Recording | bool] = {}

    def __call__(self, args: tuple[Any, ...]) -> Any:
        if not can_replay():
            return self.run(*args)
        form, tensors, addresses = self._form(args)
        recording = self.recordings.get(form)
        if isinstance(recording, Recording):
            # Hooks of a kernel that were added since run with Triton's launch alone.
            if not any(recording.hooks):
                return recording.replay(tensors, addresses)
        elif recording:
            with Recorder(args, self.tensors) as recorder:
                results = self.run(*recorder.args)
            self.recordings[form] = recorder.recording(results) or False
            return results
        results = self.run(*args)
        if recording is None:
            if len(self.recordings) >= MOST_COMPILED:
                self.recordings.clear()
            self.recordings[form] = True
        return results

    def _form(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any], list[int]]:
        """Return a call's form, its tensors (None for an absent one), and their addresses.

        The form is all that the host code may depend on: everything but the numbers in tensors.
        """
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
        form.append(torch.backends.cuda.matmul.fp32_precision)
        return tuple(form), tensors, addresses
