"""A call of the form of earlier calls is replayed: with the same results, and without the host code
that computed them. A call of another form is not.

On a CPU a stand-in for a compiled kernel interprets it, on the memory at the addresses that a
launch passes.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs

import liger_ops
from liger_ops import library, torch_private
from liger_ops.lowering.cuda import compiled, replay
from liger_ops.lowering.cuda.activations import activations
from liger_ops.lowering.cuda.embedded import traced_launches
from liger_ops.lowering.cuda.replay import Launch, Recorder, Recording, Replays
from op_checks import as_tuple
from op_table import OPS
from op_under_test import DEVICE, OpUnderTest

pytestmark = [
    pytest.mark.device_kernels,
    pytest.mark.skipif(DEVICE == "npu", reason="calls are replayed on GPUs alone"),
]


class Interpreted:
    """An interpreted kernel, as if it had been compiled for a launch with some arguments."""

    packed_metadata = (4, 1, 0)

    def __init__(self, kernel: Any, grid: tuple[int, ...], args: Any, constants: Any) -> None:
        names = kernel.arg_names[len(args) :]
        options = {name: value for name, value in constants.items() if name not in names}
        self.launch = lambda *passed: interpret(kernel, grid, *passed, **options)
        self.args, self.function = args, id(self)
        LOADED[self.function] = self
        self.all = [*args, *(constants[name] for name in names)]
        kinds = [KINDS.get(type(arg), "constexpr") for arg in self.all]
        self.src = SimpleNamespace(signature=dict(zip(kernel.arg_names, kinds, strict=True)))
        bits = [BITS.get(kind, 64) for kind in [*kinds, "*", "*"] if kind != "constexpr"]
        parameters = ", ".join(f".param .u{bit} p" for bit in bits)
        self.asm = {"ptx": f".entry p({parameters})"}
        others = dict.fromkeys(compiled.TRITON_LAUNCHER_ONLY, False)
        # As a GPU that launches dependent kernels has it.
        others["launch_pdl"] = "DEPENDENT" in constants
        self.metadata = SimpleNamespace(**others)

    def run(self, *passed: Any) -> None:
        """Triton's launcher."""
        values = passed[9:]
        with _disable_current_modes():
            tensors = [
                at(value, arg) if isinstance(arg, Tensor) else value
                for value, arg in zip(values, self.args, strict=False)
            ]
            self.launch(*tensors, *values[len(tensors) :])

    @staticmethod
    def by_pytorch(function: int, x: int, y: int, z: int, *given: Any) -> None:
        _warps, _shared, letters, passed, _stream = given
        self = LOADED[function]
        values, kinds = [*self.all], enumerate(self.src.signature.values())
        assert passed[-2:] == (None, None) and len(letters) == len(passed)
        taken = [i for i, kind in kinds if kind != "constexpr"]
        for i, value in zip(taken, passed[:-2], strict=True):
            values[i] = value
        self.run(*range(9), *values)


# Handles of compiled kernels. As with Triton 3.8, the code of a kernel is unloaded with the kernel.
LOADED: WeakValueDictionary[int, Interpreted] = WeakValueDictionary()

BITS = {"i32": 32, "fp32": 32}
# Triton's types of what a launch passes.
KINDS: dict[type, str] = {Tensor: "*fp32", torch.nn.Parameter: "*fp32", int: "i32", float: "fp32"}


def at(address: int, like: Tensor) -> Tensor:
    """A tensor with this address, and the form of another."""
    if not like.numel():
        return torch.empty_like(like)
    steps = zip(like.shape, like.stride(), strict=True)
    size = (1 + sum((size - 1) * step for size, step in steps)) * like.element_size()
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


def interpret(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    kernel.run(*args, grid=grid, warmup=False, **options)


def replays(name: str) -> Replays | None:
    """Return the object that replays the calls of an op on a GPU."""
    run = library.OPS[name].kernels["cuda"]
    cells = dict(zip(run.__code__.co_freevars, run.__closure__ or (), strict=True))
    found = cells["replayed"].cell_contents
    assert found is None or isinstance(found, Replays)
    return found


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE == "cpu":
        from triton.runtime.interpreter import InterpretedFunction

        def launch(kernel: Any, grid: Any) -> Callable[..., Any]:
            def run(*args: Any, **constants: Any) -> Interpreted:
                interpret(kernel, grid, *args, **constants)
                return Interpreted(kernel, grid, args, constants)

            return run

        streams = SimpleNamespace(get_current_stream=lambda device: 0)
        monkeypatch.setattr(InterpretedFunction, "__getitem__", launch)
        monkeypatch.setattr(compiled, "driver", SimpleNamespace(active=streams))
        monkeypatch.setattr(compiled, "_direct", True)
        monkeypatch.setattr(compiled, "_COMPILED", {})
        allocate = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
        monkeypatch.setattr(replay, "empty_strided_cuda", allocate)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
        launcher = SimpleNamespace(_launch_kernel=Interpreted.by_pytorch)
        monkeypatch.setitem(torch_private.__dict__, "StaticCudaLauncher", launcher)
    for name in library.OPS:
        if (calls := replays(name)) is not None:
            monkeypatch.setattr(calls, "recordings", {})
    yield


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops whose arguments are checked from now on."""
    names: list[str] = []

    def noted(name: str, call: Any, allocate: Any = library.allocate) -> Any:
        names.append(name)
        return allocate(name, call)

    monkeypatch.setattr(library, "allocate", noted)
    return names


# A sort has two results, and on a GPU parts of bfloat16 are joined, of a list of tensors.
NOT_REPLAYED = ("embedding_backward", "mhc_coeffs_backward", "log_prob_backward-words")


@pytest.mark.parametrize("backward", (False, True), ids=("forward", "backward"))
@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_a_replayed_call_computes_the_same(
    op: OpUnderTest, backward: bool, checked: list[str]
) -> None:
    case, name = op.sample(torch.bfloat16), op.backward_name if backward else op.name
    arguments = op.backward_args if backward else op.forward_args
    kernel, calls = library.OPS[name].kernels["cuda"], replays(name)
    expected = as_tuple(kernel(*arguments(case, op.tensors(case))))
    for _ in range(2):
        found = as_tuple(kernel(*arguments(case, op.tensors(case))))
        for x, y in zip(found, expected, strict=True):
            assert x is y is None or (torch.equal(x, y) and x.stride() == y.stride())
    label = f"{name}-{op.form}" if op.form else name
    assert calls is None or checked.count(name) == 2 or label in NOT_REPLAYED


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-5, *options: Any) -> Tensor:
    return library.OPS["rms_norm"].kernels["cuda"](x, weight, eps, *options)


def norm_arguments(**changes: Any) -> tuple[Any, ...]:
    x = torch.randn(6, 32, device=DEVICE)
    weight = torch.randn(32, device=DEVICE)
    given: dict[str, Any] = {"x": x, "weight": weight, "eps": 1e-5, "offset": 0.0, **changes}
    return tuple(value(x) if callable(value) else value for value in given.values())


CHANGES: dict[str, dict[str, Any]] = {
    "rows": {"x": lambda x: x[:5]},
    "strides": {"x": lambda x: x.new_zeros(32, 6).normal_().T},
    "alignment": {"x": lambda x: x.new_zeros(193).normal_()[1:].view(6, 32)},
    "dtype": {"x": lambda x: x.bfloat16()},
    "weight's dtype": {"weight": lambda x: x[0].half()},
    "no weight": {"weight": None},
    "eps": {"eps": 0.5},
    "offset": {"offset": 1.0},
}


@pytest.fixture
def replayed(checked: list[str]) -> list[str]:
    """`checked`, after calls with which the next one of `norm_arguments()` is replayed."""
    for _ in range(3):
        rms_norm(*norm_arguments())
    checked.clear()
    return checked


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_call_of_another_form_is_computed_as_such(
    change: dict[str, Any], replayed: list[str]
) -> None:
    rms_norm(*norm_arguments())
    assert not replayed
    for _ in range(3):
        args = norm_arguments(**change)
        expected = library.OPS["rms_norm"].definition(*args)
        torch.testing.assert_close(rms_norm(*args), expected)
    assert len(replayed) == 2
    rms_norm(*norm_arguments())
    assert len(replayed) == 2


def test_a_call_of_another_precision_is_not_replayed(replayed: list[str]) -> None:
    products = torch.backends.cuda.matmul
    precision = products.fp32_precision
    products.fp32_precision = "tf32" if precision != "tf32" else "ieee"
    try:
        rms_norm(*norm_arguments())
    finally:
        products.fp32_precision = precision
    assert replayed == ["rms_norm"]
    rms_norm(*norm_arguments())
    assert len(replayed) == 1


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"weight": lambda x: x[0, :31]}, "weight must have the shape"),
    "dtype": ({"weight": lambda x: x[0].long()}, "weight must be a floating point tensor"),
    "option": ({"eps": -1.0}, "eps must be a number of at least 0"),
    "together": ({"weight": None, "offset": 1.0}, "offset must be 0 without weight"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_are_noticed_after_right_ones(
    change: dict[str, Any], message: str, replayed: list[str]
) -> None:
    for _ in range(3):
        with pytest.raises((TypeError, ValueError), match=message):
            rms_norm(*norm_arguments(**change))
    assert len(replayed) == 3


@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU tensor's op runs its definition: --device cuda")
def test_forward_and_backward_are_replayed(checked: list[str]) -> None:
    x, weight = (tensor.requires_grad_() for tensor in norm_arguments()[:2])
    found = []
    for _ in range(4):
        y = liger_ops.rms_norm(x, weight)
        found.append(torch.autograd.grad(y, (x, weight), y.detach()))
    assert all(all(map(torch.equal, gradients, found[0])) for gradients in found)
    assert checked == ["rms_norm", "rms_norm_backward"] * 2


def test_one_tensor_may_be_two_arguments() -> None:
    kernel, x = library.OPS["swiglu"].kernels["cuda"], torch.randn(4, 32, device=DEVICE)
    y = torch.randn(4, 32, device=DEVICE)
    found = [kernel(a, b) for a, b in ((x, x), (x, x), (x, y), (y, y))]
    for value, (a, b) in zip(found, ((x, x), (x, x), (x, y), (y, y)), strict=True):
        torch.testing.assert_close(value, torch.nn.functional.silu(a) * b)


def test_a_call_within_a_recorded_one_is_part_of_it(checked: list[str]) -> None:
    """rms_norm_rope of wide heads calls the kernels of rms_norm and of rope."""
    kernel = library.OPS["rms_norm_rope"].kernels["cuda"]
    shapes = (1, 1, 2, 2048), (2048,), (2, 2048)
    q, weight, table = (torch.randn(shape, device=DEVICE) for shape in shapes)
    found = [kernel(q, q, table, table, weight, weight) for _ in range(3)]
    assert all(torch.equal(value[0], found[0][0]) for value in found)
    assert checked == ["rms_norm_rope", "rms_norm", "rms_norm"] * 2


def test_triton_hooks_see_what_would_be_replayed(
    replayed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = importlib.import_module("liger_ops.lowering.cuda.norms.rms_norm").rms_norm_kernel
    hook = lambda *args, **kwargs: None
    for hooks in (kernel.pre_run_hooks, knobs.runtime.launch_enter_hook.calls):
        hooks.append(hook)
        rms_norm(*norm_arguments())
        hooks.remove(hook)
    assert len(replayed) == 2
    rms_norm(*norm_arguments())
    assert len(replayed) == 2


def test_a_recording_does_not_keep_what_a_call_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    """tiled_mlp has one tile in memory at a time."""
    held: list[int] = []

    class Watched(Recorder):
        def __exit__(self, *exception: Any) -> None:
            held.append(len(self.indices))
            super().__exit__(*exception)

    monkeypatch.setattr(replay, "MOST_COMPUTED", 100)
    monkeypatch.setattr(replay, "Recorder", Watched)
    op = OPS["tiled_mlp_forward"]
    case, calls = op.sample(torch.bfloat16), replays(op.name)
    for _ in range(2):
        library.OPS[op.name].kernels["cuda"](*op.forward_args(case, op.tensors(case)))
    assert calls is not None and list(calls.recordings.values()) == [False]
    assert held[-1] == 0


def test_a_recording_keeps_the_code_of_its_kernels(checked: list[str]) -> None:
    """Triton's and our own records of compiled kernels may be cleared between two replays."""
    run, calls = library.OPS["swiglu"].kernels["cuda"], replays("swiglu")
    x = torch.randn(4, 32, device=DEVICE)
    expected = [run(x, x) for _ in range(2)][-1]
    assert calls is not None
    (recording,) = calls.recordings.values()
    assert isinstance(recording, Recording) and len(checked) == 2
    launched = [step for step in recording.steps if isinstance(step, Launch)]
    # By PyTorch's launcher, which is given the handle of the code alone.
    assert launched and all(isinstance(step.launch, partial) for step in launched)
    compiled._COMPILED.clear()
    getattr(activations._gated_kernel, "device_caches", {}).clear()
    gc.collect()
    assert torch.equal(run(x, x), expected) and len(checked) == 2


def test_nothing_is_replayed_while_launches_are_traced() -> None:
    with traced_launches():
        assert not compiled.can_replay()
    assert compiled.can_replay()
