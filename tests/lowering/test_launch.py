"""The launch of a GPU kernel: code that Triton compiled is launched again for arguments with the
same key, and for no others."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import jit

import liger_ops
from interpreter import restore_language
from liger_ops import torch_private
from liger_ops.lowering.cuda import compiled as launching
from liger_ops.lowering.cuda.launch import launch
from op_under_test import DEVICE

STREAM = 7


ARGUMENTS = ("x_ptr", "y_ptr", "M", "scale", "FLAG", "BLOCK")


def stand_in(run: Any, *function: int, parameters: tuple[str, ...] = ARGUMENTS) -> Any:
    """A stand-in for what Triton compiled."""
    given = dict(zip(("function",), function, strict=False))
    source = SimpleNamespace(signature=dict.fromkeys(parameters, "i32"))
    return SimpleNamespace(run=run, packed_metadata=(4,), src=source, **given)


class Kernel:
    """A stand-in for a Triton kernel that records what it compiles and what is launched."""

    arg_names = ARGUMENTS

    def __init__(self, compiles: bool = True) -> None:
        self.fn = lambda: None
        self.pre_run_hooks: list[Any] = []
        self.compiles = compiles
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.result = stand_in(self.launch, 1)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **constants: Any) -> Any:
            self.compiled.append((grid, args, constants))
            if not self.compiles:
                return None
            return self.result

        return run

    def launch(self, *passed: Any) -> None:
        assert passed[:9] == (*passed[:2], 1, STREAM, 1, (4,), None, None, None)
        self.launched.append((passed[:2], passed[9:]))


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launching, "_COMPILED", {})
    monkeypatch.setattr(launching, "_direct", True)
    if DEVICE == "cpu":
        streams = SimpleNamespace(get_current_stream=lambda device: STREAM)
        monkeypatch.setattr(launching, "driver", SimpleNamespace(active=streams))
    yield


def run(kernel: Kernel, **changes: Any) -> dict[str, Any]:
    """Launch with some arguments changed."""
    given: dict[str, Any] = {
        "grid": (3,),
        "x": torch.zeros(64),
        "y": torch.zeros(64),
        "M": 5,
        "scale": 0.5,
        "BLOCK": 16,
        "num_warps": 4,
        **changes,
    }
    x, y = given["x"], given["y"]
    options = {name: given[name] for name in ("BLOCK", "num_warps")}
    launch(kernel, given["grid"], x, x, y, given["M"], given["scale"], **options, FLAG=True)
    return given


def test_the_same_form_is_compiled_once_and_launched_with_its_own_memory() -> None:
    kernel = Kernel()
    run(kernel)
    given = [run(kernel) for _ in range(2)]
    assert len(kernel.compiled) == 1
    # The constants are in the order of the parameters.
    assert kernel.launched == [
        ((3, 1), (value["x"].data_ptr(), value["y"].data_ptr(), 5, 0.5, True, 16))
        for value in given
    ]


def unaligned(length: int = 64) -> Tensor:
    return torch.zeros(length + 1)[1:]


CHANGES: dict[str, dict[str, Any]] = {
    "dtype": {"y": torch.zeros(64, dtype=torch.bfloat16)},
    "alignment": {"y": unaligned()},
    "no tensor": {"y": None},
    "number": {"M": 6},
    "type of a number": {"M": 5.0},
    "grid": {"grid": (4,)},
    "constant": {"BLOCK": 32},
    "option": {"num_warps": 8},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_another_form_is_compiled(change: dict[str, Any]) -> None:
    kernel = Kernel()
    for _ in range(2):
        run(kernel)
        run(kernel, **change)
    assert len(kernel.compiled) == 2
    assert len(kernel.launched) == 2


def test_another_kernel_is_compiled() -> None:
    kernels = [Kernel(), Kernel()]
    for kernel in kernels * 2:
        run(kernel)
    assert all(len(kernel.compiled) == len(kernel.launched) == 1 for kernel in kernels)


def test_a_setting_of_tritons_is_compiled_for() -> None:
    kernel = Kernel()
    run(kernel)
    with knobs.runtime.scope():
        knobs.runtime.debug = True
        run(kernel)
    with knobs.compilation.scope():
        knobs.compilation.instrumentation_mode = "some"
        run(kernel)
    run(kernel)
    assert len(kernel.compiled) == 3
    assert len(kernel.launched) == 1


@pytest.mark.parametrize("hook", ("pre_run", "launch_enter", "launch_exit", "add_stages"))
def test_a_launch_under_a_hook_is_left_to_triton(hook: str) -> None:
    kernel = Kernel()
    run(kernel)
    called = lambda *args, **kwargs: None
    if hook == "add_stages":
        with knobs.runtime.scope():
            knobs.runtime.add_stages_inspection_hook = called
            run(kernel)
            run(kernel)
            knobs.runtime.add_stages_inspection_hook = None
            assert not launching._hooked()
    else:
        of_kernel = hook == "pre_run"
        hooks = kernel.pre_run_hooks if of_kernel else getattr(knobs.runtime, f"{hook}_hook").calls
        hooks.append(called)
        run(kernel)
        run(kernel)
        hooks.pop()
    assert not kernel.launched
    assert len(kernel.compiled) == 3
    run(kernel)
    assert len(kernel.launched) == 1


def test_the_interpreter_compiles_nothing() -> None:
    kernel = Kernel(compiles=False)
    run(kernel)
    run(kernel)
    assert len(kernel.compiled) == 2
    assert not launching._COMPILED


SURPRISES: dict[str, tuple[str, Any]] = {
    "no compiled function": ("compiled", stand_in(None)),
    "another signature": ("compiled", stand_in(lambda grid, stream: None, 1)),
    "fewer parameters": ("compiled", stand_in(print, 1, parameters=ARGUMENTS[:-1])),
    "parameters in another order": ("compiled", stand_in(print, 1, parameters=ARGUMENTS[::-1])),
    "no source": ("compiled", SimpleNamespace(run=print, function=1, packed_metadata=(4,))),
    "no stream": ("driver", SimpleNamespace()),
    "no settings": ("triton", SimpleNamespace(__version__="9.9.0")),
    "no names of arguments": ("arg_names", None),
    "no hooks": ("pre_run_hooks", None),
}


@pytest.mark.parametrize(("what", "instead"), SURPRISES.values(), ids=SURPRISES.keys())
def test_any_surprise_leaves_all_launches_to_triton(
    what: str, instead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, other = Kernel(), Kernel()
    if what == "compiled":
        kernel.result = instead
    elif instead is None:
        monkeypatch.delattr(*((Kernel, what) if what == "arg_names" else (kernel, what)))
    else:
        monkeypatch.setattr(launching, what, instead)
    with pytest.warns(UserWarning, match="launches all kernels from now on") as warned:
        for _ in range(3):
            run(kernel)
            run(other)
    assert len(warned) == 1
    assert len(kernel.compiled) == 3
    assert len(other.compiled) + len(other.launched) == 3 and len(other.launched) <= 1
    assert not launching._direct and not launching._COMPILED


def test_versions_that_were_not_run_with_are_left_to_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all(map(launching.is_supported, ("3.6.0", "3.6.1+rocm7", "3.7.1", "3.8.0", "3.9.0")))
    assert not any(map(launching.is_supported, ("3.5.1", "3.60.0", "3.10.0", "4.0", "main")))
    monkeypatch.setattr(launching, "_direct", False)
    kernel = Kernel()
    run(kernel)
    run(kernel)
    assert len(kernel.compiled) == 2 and not kernel.launched


def two_vectors(x_ptr, y_ptr, M, scale, FLAG, BLOCK: tl.constexpr):
    """A kernel with the signature of `Kernel`."""


def test_the_installed_triton_passes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch from here passes the same arguments as Triton's own, in the same order."""
    seen: list[tuple[Any, ...]] = []
    compiled = stand_in(lambda *passed: seen.append(passed), 1)
    compiled.launch_metadata = lambda *args: None
    active = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: STREAM,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    for module in (jit, launching):
        monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(jit.JITFunction, "_do_compile", lambda *args, **kwargs: compiled)
    kernel: Any = jit.JITFunction(two_vectors)
    run(kernel)
    run(kernel)
    (*tritons, _metadata, _enter, _leave), ours = seen[0][:9], seen[1]
    assert ours[:9] == (*tritons, None, None, None)
    arguments = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in seen[0][9:]]
    assert [type(arg) for arg in ours[9:]] == [type(arg) for arg in arguments]
    assert list(ours[11:]) == arguments[2:]


@pytest.mark.parametrize("other", ("order", "count", "keywords", "name"))
def test_another_way_of_launching_is_noticed(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed Triton passes to a launcher the arguments that a direct launch passes."""
    assert launching.has_same_launcher()

    def launch(self: Any, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, stream: Any = None) -> None:
            passed = (*grid, stream, self.function, self.packed_metadata, None, None, None, *args)
            if other == "order":
                self.run(*passed[3:], *grid)
            elif other == "count":
                self.run(*passed[:-2], args)
            elif other == "keywords":
                self.run(*passed[:3], *passed[4:], stream=stream)
            else:
                self.launch(*passed)

        return run

    monkeypatch.setattr(triton.compiler.CompiledKernel, "__getitem__", launch)
    assert not launching.has_same_launcher()


def shifted(x_ptr, y_ptr, w_ptr, M, N, one, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < M, other=0.0)
    if w_ptr is not None:
        x += tl.load(w_ptr + i)
    tl.store(y_ptr + i, x * scale + N, mask=i < M * one)


def compile_shifted(**options: Any) -> Any:
    kinds = ("*bf16", "*fp32", "constexpr", "i32", "i64", "constexpr", "fp32", "constexpr")
    kernel: Any = jit.JITFunction(shifted)
    signature = dict(zip(kernel.arg_names, kinds, strict=True))
    source = ASTSource(kernel, signature, {"w_ptr": None, "one": 1, "BLOCK": 128})
    restore_language()
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def test_the_installed_triton_compiles_what_pytorch_launches() -> None:
    """The parameters that are passed, and their types, are those of the compiled code."""
    kernel = compile_shifted(num_warps=8)
    kernel.function = 5
    assert [*kernel.src.signature] == [*kernel.src.fn.arg_names]
    launch = launching.Compiled(kernel, (3, 2, 1), []).by_pytorch()
    if torch_private.has("StaticCudaLauncher"):
        assert launch is not None and launch[1] == [0, 1, 3, 4, 6]
        assert launch[0].args == (5, 3, 2, 1, 8, 0, "OOilfOO")
    else:
        assert launch is None
    dependent = compile_shifted(launch_pdl=True)
    assert launching.Compiled(dependent, (3, 2, 1), []).by_pytorch() is None


ENTRY = (
    ".visible .entry f(\n  .param .u64 .ptr .global .align 1 f_param_0,\n  .param .u32 f_param_1"
)
OWN = ",\n  .param .u64 .ptr .global .align 1 f_param_2,\n  .param .u64 f_param_3"
METADATA = dict.fromkeys(launching.TRITON_LAUNCHER_ONLY, 0)
LAUNCHED: dict[str, dict[str, Any]] = {
    "parameters of another size": {"signature": {"x": "*fp32", "M": "i64"}},
    "a type that is not known": {"signature": {"x": "*fp32", "M": "u1"}},
    "a tuple": {"signature": {"x": "*fp32", "M": ("i32", "i32")}},
    "fewer parameters": {"asm": {"ptx": ENTRY + ")"}},
    "more parameters": {"asm": {"ptx": ENTRY + OWN + OWN + ")"}},
    "no code": {"asm": {}},
    "a cluster": {"packed_metadata": (4, 2, 0)},
    "more in the metadata": {"packed_metadata": (4, 1, 0, 1)},
    "much shared memory": {"packed_metadata": (4, 1, 229 * 1024)},
    "a large grid": {"grid": (2**16, 2**15, 1)},
    **{name: {"metadata": METADATA | {name: 1}} for name in METADATA},
    "no metadata": {"metadata": {}},
}


@pytest.mark.parametrize("change", LAUNCHED.values(), ids=LAUNCHED.keys())
def test_pytorch_launches_no_other_kernels(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = SimpleNamespace(_launch_kernel=print)
    monkeypatch.setitem(torch_private.__dict__, "StaticCudaLauncher", launcher)

    def by_pytorch(grid: tuple[int, ...] = (1, 1, 1), **changes: Any) -> Any:
        given = {
            "signature": {"x": "*fp32", "M": "i32"}, "asm": {"ptx": ENTRY + OWN + ")"},
            "packed_metadata": (4, 1, 0), "metadata": METADATA, "function": 5, **changes,
        }  # fmt: skip
        source = SimpleNamespace(signature=given.pop("signature"))
        metadata = SimpleNamespace(**given.pop("metadata"))
        kernel = SimpleNamespace(src=source, metadata=metadata, **given)
        return launching.Compiled(kernel, grid, []).by_pytorch()

    assert by_pytorch() is not None
    assert by_pytorch(**change) is None


def test_forms_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MOST_COMPILED", 4)
    kernel = Kernel()
    for M in range(20):
        run(kernel, M=M)
        assert len(launching._COMPILED) <= 4
    run(kernel, M=19)
    assert len(kernel.launched) == 1


@pytest.mark.device_kernels
@pytest.mark.skipif(DEVICE != "cuda", reason="Triton's launch hooks need a GPU: --device cuda")
def test_tritons_launch_hooks_see_every_launch() -> None:
    x = torch.randn(4, 64, device=DEVICE)
    seen: list[str] = []
    hook = lambda metadata: seen.append(metadata.get()["name"])
    expected = liger_ops.rms_norm(x)
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        results = [liger_ops.rms_norm(x) for _ in range(3)]
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["rms_norm_kernel"] * 3
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.device_kernels
@pytest.mark.skipif(DEVICE != "cuda", reason="memory addresses of a GPU: --device cuda")
def test_every_alignment_and_size_has_its_own_kernel() -> None:
    """Code compiled for aligned rows of 64 is not launched for others, nor the reverse."""
    for start in (0, 1, 8, 0, 1):
        for columns in (64, 63, 1, 64):
            for rows in (1, 16, 5, 16):
                x = torch.randn(rows * columns + start, device=DEVICE)[start:].view(rows, columns)
                weight = torch.randn(columns + start, device=DEVICE)[start:]
                expected = torch.nn.functional.rms_norm(x.double(), (columns,), weight.double())
                result = liger_ops.rms_norm(x, weight, torch.finfo(torch.float64).eps)
                torch.testing.assert_close(result, expected.float())
