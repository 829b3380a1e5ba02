"""Functions that `fuse` recognises as rope, and functions that are nearly rope."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as glm4
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as gpt_oss
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb as llama4
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as olmo2
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as phi3
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision as vision

from graphs import Recorder, liger_ops_of
from liger_ops import fuse, unfuse
from liger_ops.fusion import FuseReport, rope

B, H, K, S, D = 2, 4, 2, 5, 16


class Rotating(nn.Module):
    """Calls a global function with the arguments of its forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return rotate(*args, **kwargs)


rotate: Callable[..., Any] = llama


@pytest.fixture
def calling(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], nn.Module]:
    """Makes a fused module whose forward calls the given function."""

    def fused(function: Callable[..., Any]) -> nn.Module:
        monkeypatch.setattr(sys.modules[__name__], "rotate", function)
        module = Rotating()
        fuse(module)
        return module

    return fused


def ops_of(module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> list[str]:
    """The liger ops that a forward runs."""
    names = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, a: Any = (), k: Any = None) -> Any:
            namespace, _, name = str(function).partition(".")
            names.extend([name.partition(".")[0]] if namespace == "liger" else [])
            return function(*a, **(k or {}))

    with Watching():
        module(*args, **(kwargs or {}))
    return names


def tensors(
    layout: str = "bhsd",
    width: int = D,
    dtype: torch.dtype = torch.float32,
    table_dtype: torch.dtype | None = None,
    leading: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys as attention gets them, as views of projections, and tables."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"b": B, "s": S, "d": D}
    heads = []
    for count in (H, K):
        shape = [count if name == "h" else sizes[name] for name in layout]
        heads.append(torch.randn(shape, generator=generator).to(dtype))
    table_shape = (*leading, *([B] if "b" in layout else []), S, width)
    angles = 3 * torch.randn(table_shape, generator=generator)
    tables = (table.to(table_dtype or dtype) for table in (angles.cos(), angles.sin()))
    return (*heads, *tables)


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """GPT-J's pairs, with a table entry per element, as in Cohere."""

    def turned(x: Tensor) -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def multimodal(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Qwen2-VL's own code, which combines three tables into one."""
    parts = mrope_section * 2
    tables = []
    for table in (cos, sin):
        pieces = [piece[i % 3] for i, piece in enumerate(table.split(parts, -1))]
        tables.append(torch.cat(pieces, -1))
    return llama(q, k, *tables, unsqueeze_dim)


def complex_table(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return q, k, torch.complex(cos[..., : D // 2].float(), sin[..., : D // 2].float())


LLAMA = {"interleaved": False}
PAIRS = {"interleaved": False, "per_pair": True}

# A function, its non-tensor arguments, the arguments of `tensors`, and the op's options.
FORMS = [
    (llama, {}, {}, LLAMA),
    (llama, {"unsqueeze_dim": 2}, {"layout": "bshd"}, LLAMA),
    (olmo2, {}, {}, LLAMA),
    (phi3, {}, {}, LLAMA),
    (phi3, {}, {"width": 8}, LLAMA),
    (phi3, {}, {"width": 6}, LLAMA),
    (interleaved, {}, {}, {"interleaved": True}),
    (gpt_oss, {}, {"width": D // 2}, PAIRS),
    (glm4, {}, {}, {**PAIRS, "interleaved": True}),
    (glm4, {}, {"width": D // 2}, {**PAIRS, "interleaved": True}),
    (vision, {}, {"layout": "shd"}, LLAMA),
    (multimodal, {"mrope_section": [2, 3, 3]}, {"leading": (3,)}, LLAMA),
]
FORM_IDS = [f"{form[0].__module__.rpartition('.')[2]}-{i}" for i, form in enumerate(FORMS)]


@pytest.mark.parametrize(("function", "kwargs", "given", "options"), FORMS, ids=FORM_IDS)
def test_options_are_found(
    calling: Any,
    function: Callable[..., Any],
    kwargs: dict[str, Any],
    given: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """The op runs with the function's results: in float32, and within rounding in bfloat16."""
    module = calling(function)
    report_of = rope.plan(Rotating()).findings
    assert [(entry.op, entry.options, entry.kind) for entry in report_of] == [
        ("rope", options, "rotary embedding")
    ]
    args = [x.requires_grad_() for x in tensors(**given)]
    assert ops_of(module, args, kwargs) == ["rope"]
    y, expected = module(*args, **kwargs), function(*args, **kwargs)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    dy = [torch.randn(part.shape) for part in y]
    torch.testing.assert_close(
        torch.autograd.grad(y, args[:2], dy), torch.autograd.grad(expected, args[:2], dy)
    )
    args = tensors(**given, dtype=torch.bfloat16)
    assert ops_of(module, args, kwargs) == ["rope"]
    # Each product is at most the number, and each of three roundings changes it by up to 2**-9.
    for ours, theirs, x in zip(
        module(*args, **kwargs), function(*args, **kwargs), args, strict=False
    ):
        assert ours.dtype is theirs.dtype is torch.bfloat16
        assert ((ours - theirs).abs() <= 2**-7 * (1 + x.abs().max())).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_complex_frequencies(calling: Any, dtype: torch.dtype) -> None:
    module = calling(llama4)
    args = complex_table(*tensors("bshd", dtype=dtype))
    assert ops_of(module, args) == ["rope"]
    for ours, theirs in zip(module(*args), llama4(*args), strict=True):
        # Both compute in float32 and round once.
        torch.testing.assert_close(ours, theirs, rtol=torch.finfo(dtype).eps, atol=1e-6)


# Calls that the op does not handle, of functions that are rope in other calls.
FALLBACKS = [
    (llama, {"unsqueeze_dim": 0}, {"layout": "shd"}),
    (llama, {"unsqueeze_dim": -3}, {}),
    (llama, {}, {"dtype": torch.float64, "table_dtype": torch.float32}),
    (llama, {}, {"table_dtype": torch.bfloat16}),
    (vision, {}, {"layout": "shd", "table_dtype": torch.float64}),
]


@pytest.mark.parametrize(("function", "kwargs", "given"), FALLBACKS)
def test_other_calls_reach_the_function(
    calling: Any, function: Callable[..., Any], kwargs: dict[str, Any], given: dict[str, Any]
) -> None:
    module = calling(function)
    args = tensors(**given)
    if kwargs.get("unsqueeze_dim") == 0:
        args = (args[0].transpose(0, 1), args[1].transpose(0, 1), *args[2:])
    assert ops_of(module, args, kwargs) == []
    for ours, theirs in zip(module(*args, **kwargs), function(*args, **kwargs), strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)


def test_broadcast_positions_and_wrong_arguments_reach_the_function(calling: Any) -> None:
    module = calling(llama)
    q, k, cos, sin = tensors()
    one = cos[:, :1], sin[:, :1]
    assert ops_of(module, (q, k, *one)) == []
    assert torch.equal(module(q, k, *one)[0], llama(q, k, *one)[0])
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'sin'"):
        module(q, k, cos)
    with pytest.raises(RuntimeError):
        module(q, k, cos[..., :6], sin[..., :6])
    assert ops_of(module, (q, k.double(), cos, sin)) == []
    assert torch.equal(module(q, k.double(), cos, sin)[1], llama(q, k.double(), cos, sin)[1])
    assert ops_of(module, (), {"q": q, "k": k, "sin": sin, "cos": cos}) == ["rope"]
    assert ops_of(module, (q, k, cos[:1], sin[:1])) == ["rope"]


def test_wide_tables(calling: Any) -> None:
    """Code that computes in float32 and returns the queries' dtype is rope for float32 tables."""
    module = calling(vision)
    args = tensors("shd", dtype=torch.bfloat16, table_dtype=torch.float32)
    assert ops_of(module, args) == ["rope"]
    torch.testing.assert_close(module(*args), vision(*args), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("function", "given"), [(llama, {}), (phi3, {"width": 8})])
def test_wide_tables_of_code_that_promotes(
    calling: Any,
    function: Callable[..., Any],
    given: dict[str, Any],
    dtype: torch.dtype,
    autocast: bool,
) -> None:
    """With queries from a linear layer in autocast and float32 tables, the results are float32."""
    module = calling(function)
    args = tensors(**given, dtype=dtype, table_dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        assert ops_of(module, args) == ["rope"]
        y, expected = module(*args), function(*args)
        assert [part.dtype for part in y] == [part.dtype for part in expected]
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)


def test_results_keep_the_layout(calling: Any) -> None:
    module = calling(llama)
    q, k, cos, sin = tensors()
    q = torch.randn(B, S, H, D).transpose(1, 2)
    assert module(q, k, cos, sin)[0].stride() == q.stride()


# Functions that each differ from rope in one thing.


def other_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs each element with the one at the opposite end."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + q.flip(-1) * sin, k * cos + k.flip(-1) * sin


def scaled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return llama(q, k, 1.01 * cos, sin)


def other_way(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return llama(q, k, cos, -sin)


def queries_alone(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return llama(q, k, cos, sin)[0], k


def de_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As in DeepSeek-V3: pairs are adjacent in the input, and in halves in the output."""
    q, k = (torch.cat((x[..., ::2], x[..., 1::2]), -1) for x in (q, k))
    return llama(q, k, cos, sin)


def detached(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    y, z = llama(q, k, cos, sin)
    return y, z + k.detach() - k


def rounded(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if q.dtype is torch.float32:
        return llama(q, k, cos, sin)
    q, k = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (q, k))
    return llama(q, k, cos, sin)


NEAR_MISSES = [
    (other_pairs, "rotate computes no rope"),
    (scaled, "rotate computes no rope"),
    (other_way, "rotate computes no rope"),
    (queries_alone, "rotate computes no rope"),
    (de_interleaved, "rotate computes no rope"),
    (detached, "rotate has the values of rope but another gradient"),
    (rounded, "but rounds elsewhere in bfloat16"),
]


@pytest.mark.parametrize(("function", "reason"), NEAR_MISSES, ids=lambda value: str(value)[:20])
def test_near_miss_is_left_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], reason: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "rotate", function)
    module = nn.Sequential(Rotating())
    report = fuse(module)
    assert not report
    assert type(module[0]) is Rotating
    assert [(entry.where, entry.class_name) for entry in report.left] == [("0", "Rotating")]
    assert reason in report.left[0].reason


def test_functions_of_other_parameters_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def dangerous(a: Any, b: Any, c: Any, d: Any) -> None:
        raise AssertionError("called")

    monkeypatch.setattr(sys.modules[__name__], "rotate", dangerous)
    assert fuse(Rotating()) == FuseReport()


# Forwards.


def doubling(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, factor: float = 2.0, **kwargs: Any) -> Any:
        q, k = forward(self, *args, **kwargs)
        return q * factor, k

    return wrapper


class Hidden:
    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward


def keeping(forward: Callable[..., Any]) -> Callable[..., Any]:
    hidden = Hidden(forward)

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any) -> Any:
        return hidden.forward(self, *args)

    return wrapper


class Decorated(Rotating):
    @doubling
    @doubling
    def forward(self, q: Tensor, k: Tensor, *tables: Tensor, unused: int = 3) -> Any:
        return rotate(q, k, *tables)


class Base(nn.Module):
    def forward(self, *args: Tensor) -> Any:
        return rotate(*args)


class CallsSuper(Base):
    def forward(self, *args: Tensor) -> Any:
        q, k = rotate(*args)
        return super().forward(q, k, *args[2:])


def test_decorated_forward() -> None:
    module = Decorated()
    signature = inspect.signature(module.forward)
    assert len(fuse(module)) == 1
    assert inspect.signature(module.forward) == signature
    args = tensors()
    assert ops_of(module, args) == ["rope"]
    torch.testing.assert_close(module(*args), Decorated()(*args))
    torch.testing.assert_close(module(*args, factor=0.5), Decorated()(*args, factor=0.5))


def test_forward_that_calls_its_base_class() -> None:
    """Only the class's own forward is changed to call the op."""
    module = CallsSuper()
    assert len(fuse(module)) == 1
    args = tensors()
    assert ops_of(module, args) == ["rope"]
    torch.testing.assert_close(module(*args), CallsSuper()(*args))


def test_forwards_that_cannot_be_made_again_are_left() -> None:
    class Kept(Rotating):
        @keeping
        def forward(self, *args: Tensor) -> Any:
            return rotate(*args)

    class Attribute(Rotating):
        def forward(self, *args: Tensor) -> Any:
            return rotate(*args) if self.rotate is None else self.rotate(*args)

    own = Rotating()
    own.forward = own.forward  # type: ignore[method-assign]
    reasons = [fuse(module).left[0].reason for module in (Kept(), Attribute(), own)]
    assert reasons[0].startswith("its forward is wrapped by")
    assert reasons[0].endswith("Kept.forward, which cannot be made again")
    assert reasons[1] == "its forward uses the name rotate for more than a call"
    assert reasons[2] == "the instance has a forward of its own"


def test_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    module, other = Rotating(), Rotating()
    forward = Rotating.forward
    assert len(fuse(module)) == 1
    cls = type(module)
    assert fuse(module) == FuseReport()
    assert type(module) is cls and cls.__name__ == "Rotating" and isinstance(module, Rotating)
    assert type(other) is Rotating and Rotating.forward is forward and rotate is llama
    args = tensors()
    assert ops_of(other, args) == []
    assert ops_of(module, args) == ["rope"]
    assert unfuse(module) == 1
    assert type(module) is Rotating
    assert ops_of(module, args) == []


added = 0.0


class Adding(nn.Module):
    def forward(self, *args: Tensor) -> Any:
        q, k = rotate(*args)
        return q + added, k


def test_later_changes_of_globals_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Adding()
    fuse(module)
    args = tensors()
    before = module(*args)
    monkeypatch.setattr(sys.modules[__name__], "added", 1.0)
    torch.testing.assert_close(module(*args)[0], before[0] + 1)


def test_another_function_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two modules, each fused with the function that its forward called at the time."""
    one = Rotating()
    fuse(one)
    monkeypatch.setattr(sys.modules[__name__], "rotate", interleaved)
    two = Rotating()
    fuse(two)
    args = tensors()
    assert ops_of(one, args) == ops_of(two, args) == ["rope"]
    torch.testing.assert_close(one(*args), llama(*args))
    torch.testing.assert_close(two(*args), interleaved(*args))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("cls", [Rotating, Decorated])
def test_compiles_whole(cls: type[nn.Module], dynamic: bool) -> None:
    module = cls()
    fuse(module)
    torch._dynamo.reset()
    recorder = Recorder()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend=recorder.backend())
    for count in (S, S + 3) if dynamic else (S,):
        q, k, cos, sin = (torch.randn(B, n, count, D) for n in (H, K, 1, 1))
        args = q.requires_grad_(), k.requires_grad_(), cos[:, 0], sin[:, 0]
        y = compiled(*args)
        torch.testing.assert_close(y, module(*args))
        (y[0].sum() + y[1].sum()).backward()
    assert liger_ops_of(recorder.forwards) == {"rope": 1}
    assert liger_ops_of(recorder.backwards) == {"rope_backward": 1}
