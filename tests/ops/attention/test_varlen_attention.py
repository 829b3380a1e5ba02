"""varlen_attention against the code of models, its documents, and the engines that compute it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

import liger_ops
import op_checks
from liger_ops.lowering.cuda.attention import cudnn_engine, varlen_attention, varlen_kernels
from op_table import OPS
from op_under_test import DEVICE, EVERY_IMPLEMENTATION, FOLDERS, INF, NAN
from varlen_calls import BACKWARD, FORWARD, call_of, drawn, gradients, ints, run
from varlen_cases import COMPILED, INPUTS

OP = OPS["varlen_attention_forward"]
ON_GPU = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU: run with --device cuda")
# The interpreter is NumPy, which warns of infinities.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def assert_same(
    ours: Tensor, theirs: Tensor, leaves: list[Tensor], rows: Tensor | None = None
) -> None:
    """Compare results and gradients, of the rows that are wanted."""
    weight = torch.randn_like(theirs)
    if rows is not None:
        weight = weight * rows.view(-1, 1, 1)
        ours, theirs = ours * rows.view(-1, 1, 1), theirs * rows.view(-1, 1, 1)
    torch.testing.assert_close(ours, theirs)
    grads = (torch.autograd.grad(y, leaves, weight) for y in (ours, theirs))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("left", "right", "heads", "E"), [(-1, 0, 2, 4), (2, 1, 4, 3), (-1, -1, 2, 4), (0, -1, 2, 7)]
)
def test_each_document_is_attention_of_its_own(left: int, right: int, heads: int, E: int) -> None:
    """An empty document has no row, and tokens of no document are 0."""
    cuts = [1, 1, 6, 7, 13]
    leaves = drawn(15, heads=heads, E=E)
    ours = liger_ops.varlen_attention(*leaves, ints(*cuts), 6, window_left=left, window_right=right)
    rows = []
    for start, end in zip(cuts[:-1], cuts[1:], strict=True):
        query, key, value = (x[start:end].transpose(0, 1) for x in leaves)
        ahead = torch.arange(end - start) - torch.arange(end - start)[:, None]
        mask = (ahead <= (right if right >= 0 else 99)) & (ahead >= -(left if left >= 0 else 99))
        y = F.scaled_dot_product_attention(query, key, value, mask.to(DEVICE), enable_gqa=True)
        rows.append(y.transpose(0, 1))
    theirs = F.pad(torch.cat(rows), (0, 0, 0, 0, 1, 2))
    assert_same(ours, theirs, leaves)


def batch_of(x: Tensor, rows: int) -> Tensor:
    """View the tokens of a batch as transformers has them, (B, heads, L, D)."""
    return x.unflatten(0, (rows, -1)).transpose(1, 2)


def mask_of(mask: Tensor | None, positions: Tensor, window: int | None = None) -> Tensor:
    config = transformers.MistralConfig(sliding_window=window)
    config._attn_implementation = "eager"
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    batch = positions if mask is None else mask
    embeds = torch.empty(*batch.shape, 8, dtype=torch.float64)
    return make(config, embeds, mask, None, positions)


RIGHT, LEFT = [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
GEMMA = SimpleNamespace(num_key_value_groups=2, training=False)


@pytest.mark.parametrize("window", (None, 2))
@pytest.mark.parametrize("side", ("right", "left"))
def test_padding_is_that_of_transformers_masks(side: str, window: int | None) -> None:
    """By Gemma 2's attention with its softcap."""
    leaves = drawn(10, heads=4)
    mask = RIGHT if side == "right" else LEFT
    if side == "right":
        documents, lengths = ints(0, 5, 10), ints(5, 3)
    else:
        documents, lengths = ints(0, 0, 5, 7, 10), ints(0, 5, 0, 3)
    ours = liger_ops.varlen_attention(
        *leaves, documents, 5, lengths, window_left=-1 if window is None else window - 1,
        scale=0.7, softcap=1.5,
    )  # fmt: skip
    dense = mask_of(torch.tensor(mask), torch.arange(5)[None], window)
    theirs, _ = modeling_gemma2.eager_attention_forward(
        GEMMA, *(batch_of(x, 2) for x in leaves), dense.to(DEVICE), scaling=0.7, softcap=1.5
    )
    # A query that sees no key has a mean of values there, and 0 here.
    seen = (dense == 0).any(-1)[:, 0].flatten().to(DEVICE)
    # Its softmax is in float32, whatever the dtype.
    torch.testing.assert_close(ours[seen], theirs.flatten(0, 1)[seen], rtol=1e-5, atol=1e-6)
    assert not ours[~seen].any() and bool(seen.all()) is (side == "right" and window is None)


def test_packed_documents_with_sinks_are_gpt_oss() -> None:
    """Take the documents of transformers' position ids, and GPT-OSS's own attention."""
    leaves = drawn(10, heads=4)
    sinks = torch.randn(4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    ours = liger_ops.varlen_attention(*leaves, ints(0, 3, 5, 10), 5, sinks=sinks)
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4]])
    dense = mask_of(None, positions)
    module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks)
    theirs, _ = modeling_gpt_oss.eager_attention_forward(
        module, *(batch_of(x, 1) for x in leaves), dense.to(DEVICE), scaling=0.5
    )
    assert_same(ours, theirs.flatten(0, 1), [*leaves, sinks])


@pytest.mark.device_kernels
@EVERY_IMPLEMENTATION
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_what_sees_no_key_is_zero(implementation: str, dtype: torch.dtype) -> None:
    """Tokens of no document, documents without keys, and windows behind the last key. With sinks
    lse is the sink."""
    call = call_of(
        12, ints(1, 5, 11), 6, dtype=dtype, window_left=1, lengths=ints(0, 3), window_right=0
    )
    blind = torch.tensor([i < 5 or i > 8 for i in range(12)], device=DEVICE)
    y, lse = run(implementation, call)
    assert not y[blind].any() and y[~blind].any(-1).all()
    assert torch.equal(lse.isneginf(), blind.expand_as(lse))
    sinks = torch.tensor([0.5, -INF], device=DEVICE)
    y, lse = run(implementation, call._replace(sinks=sinks))
    assert not y[blind].any()
    assert torch.equal(lse[:, blind], sinks.unsqueeze(1).expand(2, int(blind.sum())))
    dsinks = gradients(implementation, call._replace(sinks=sinks), torch.ones_like(y))[3]
    assert dsinks.ne(0).tolist() == [True, False]


@pytest.mark.device_kernels
@EVERY_IMPLEMENTATION
def test_no_documents(implementation: str) -> None:
    call = call_of(3, ints(2), 1)
    y, lse = run(implementation, call)
    assert not y.any() and lse.isneginf().all()
    dquery, dkey, dvalue, _ = gradients(implementation, call, torch.ones_like(y))
    assert not any(x.any() for x in (dquery, dkey, dvalue))


@pytest.mark.device_kernels
@EVERY_IMPLEMENTATION
@pytest.mark.parametrize("name", ("query", "key", "value", "sinks", "dy"))
def test_a_nan_reaches_what_depends_on_it(implementation: str, name: str) -> None:
    """And no other document, nor anything from a token that is of none, or is no key."""
    call = call_of(70, ints(2, 9, 69), 60, lengths=ints(7, 50), sinks=torch.zeros(2, device=DEVICE))
    dy = torch.ones_like(call.query)
    clean = (*run(implementation, call), *gradients(implementation, call, dy))
    given = {**call._asdict(), "dy": dy}
    places = {"sinks": [0], "key": [0, 65], "value": [0, 65]}.get(name, [0])
    poisoned = {**given, name: given[name].clone()}
    if name != "sinks":
        # Of no document, and no key.
        poisoned[name][places] = NAN
        dys, rest = poisoned.pop("dy"), FORWARD.arguments(**poisoned)
        results = (*run(implementation, rest), *gradients(implementation, rest, dys))
        for result, expected in zip(results, clean, strict=True):
            assert torch.equal(result, expected)
        poisoned["dy"] = dys
    poisoned[name][0 if name == "sinks" else 3] = NAN
    dys, rest = poisoned.pop("dy"), FORWARD.arguments(**poisoned)
    y, lse = run(implementation, rest)
    dquery, dkey, dvalue, dsinks = gradients(implementation, rest, dys)
    if name == "sinks":
        assert y[2:69, 0].isnan().all() and y[:, 1].isfinite().all() and lse[0, 2:69].isnan().all()
        assert dquery[2:69, 0].isnan().all() and dsinks.isnan().tolist() == [True, False]
        return
    # Token 3 is the second of its document, of which later tokens see it.
    if name in ("query", "key", "value"):
        assert y[3].isnan().all() and (name == "query" or y[3:9].isnan().all())
    assert dquery[3].isnan().all() and (name == "dy" or dsinks.isnan().all())
    if name in ("query", "dy"):
        assert dkey[2].isnan().all() and dkey[3].isnan().all()
    if name == "dy":
        assert dvalue[2].isnan().all()
    # The definition, which runs on an NPU for float32, multiplies tokens of other documents by 0.
    if implementation == "cuda":
        for result, expected in zip(
            (y, dquery, dkey, dvalue), (clean[0], *clean[2:5]), strict=True
        ):
            assert torch.equal(result[9:], expected[9:])


@pytest.mark.device_kernels
@pytest.mark.skipif("cuda" not in FOLDERS, reason="of the kernels for cuda")
def test_a_rows_bits_do_not_depend_on_other_documents() -> None:
    alone = call_of(70, ints(0, 70), 70, width=16, sinks=torch.ones(2, device=DEVICE))
    before, behind = (call_of(n, ints(0), 1, width=16) for n in (37, 11))
    tensors = {
        name: torch.cat([getattr(call, name) for call in (before, alone, behind)])
        for name in INPUTS
    }
    documents = ints(0, 30, 30, 37, 107, 118)
    among = alone._replace(**tensors, cu_seqlens=documents, max_seqlen=70)
    dy = torch.randn(118, 2, 16, device=DEVICE)
    for call in (alone, among):
        assert list(varlen_attention.engines(call)) == []
    one = (*run("cuda", alone), *gradients("cuda", alone, dy[37:107].contiguous())[:3])
    many = (*run("cuda", among), *gradients("cuda", among, dy)[:3])
    for i, (a, b) in enumerate(zip(one, many, strict=True)):
        assert torch.equal(a, b[:, 37:107] if i == 1 else b[37:107])


def test_more_documents_need_no_compilation() -> None:
    counter = CompileCounter()
    compiled = torch.compile(
        liger_ops.varlen_attention, backend=counter, fullgraph=True, dynamic=True
    )
    for T, *cuts in ((6, 0, 2, 6), (6, 0, 1, 2, 6), (9, 0, 0, 3, 4, 5, 9)):
        leaves = drawn(T)
        found = compiled(*leaves, ints(*cuts), 4)
        assert_same(found, liger_ops.varlen_attention(*leaves, ints(*cuts), 4), leaves)
    assert counter.frame_count == 1


def test_transforms_of_the_composed_op() -> None:
    """vmap, jvp and a double backward, by the definition."""
    leaves = [x.detach() for x in drawn(6)]
    attend = lambda *x: liger_ops.varlen_attention(*x, ints(0, 2, 6), 4, window_left=2)
    many = torch.vmap(attend)(*(torch.stack([x, 2 * x]) for x in leaves))
    torch.testing.assert_close(many[1], attend(*(2 * x for x in leaves)))
    tangents = tuple(torch.randn_like(x) for x in leaves)
    _, tangent = torch.func.jvp(attend, tuple(leaves), tangents)
    step = 1e-6
    ahead, back = (
        attend(*(x + s * t for x, t in zip(leaves, tangents, strict=True))) for s in (step, -step)
    )
    torch.testing.assert_close(tangent, (ahead - back) / (2 * step), rtol=1e-6, atol=1e-8)
    required = tuple(x.requires_grad_() for x in leaves)
    assert torch.autograd.gradgradcheck(attend, required, fast_mode=True)


# The engines.


class Engine:
    """An engine in place of another: the definition, without sinks, or an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.calls = error, 0

    def forward(self, call: Any, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.error:
            raise self.error
        # What it leaves has any value.
        results = FORWARD.definition(*call._replace(sinks=None))
        outside = results[1].isneginf()
        return results[0].masked_fill(outside.t().unsqueeze(-1), NAN), results[1].masked_fill(
            outside, 7.0
        )

    def backward(self, call: Any, *outputs: Tensor | None) -> tuple[Tensor, ...]:
        self.calls += 1
        if self.error:
            raise self.error
        results = BACKWARD.definition(*call._replace(output_mask=[True, True, True, False]))
        return tuple(x.masked_fill(x == 0, NAN) for x in results[:3])


Use = Callable[..., Engine]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Put an engine in the place of one; nothing is known of failures before."""
    monkeypatch.delenv(varlen_attention.VARIABLE, raising=False)
    monkeypatch.setattr(varlen_attention, "_failed", set())
    monkeypatch.setattr(varlen_attention, "_warned", set())

    def put(name: str, obstacle: str | None = None, error: Exception | None = None) -> Engine:
        engine = Engine(error)
        made = varlen_attention._Engine(lambda call: obstacle, engine.forward, engine.backward)
        monkeypatch.setitem(varlen_attention.ENGINES_OF_OTHERS, name, made)
        return engine

    yield put


def test_the_engine_that_is_fastest(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    use("cudnn")
    use("flash")

    def chosen(**more: Any) -> list[str]:
        options = {"max_seqlen": 512, "documents": ints(0, *[9] * 4), **more}
        return list(varlen_attention.engines(call_of(512, **options)))

    assert chosen() == ["cudnn"] and chosen(max_seqlen=511) == []
    assert chosen(documents=ints(0, *[9] * 5)) == []
    assert chosen(width=136) == ["cudnn", "flash"] and chosen(max_seqlen=9, E=136) == ["flash"]
    assert chosen(window_left=511) == ["cudnn"] and chosen(window_left=510) == []
    for name, engines in (("triton", []), ("cudnn", ["cudnn"]), ("flash", ["flash"])):
        assert chosen(engine=name) == engines
        monkeypatch.setenv(varlen_attention.VARIABLE, name)
        assert chosen(max_seqlen=9) == engines and chosen(engine="cudnn") == ["cudnn"]
    monkeypatch.setenv(varlen_attention.VARIABLE, "fast")
    with pytest.raises(ValueError, match="LIGER_OPS_ATTENTION must be one of auto, cudnn, flash"):
        chosen()
    monkeypatch.delenv(varlen_attention.VARIABLE)
    use("cudnn", "it is not installed")
    assert chosen() == []


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has the engines")
@pytest.mark.parametrize("name", ("cudnn", "flash"))
def test_an_engine_that_does_not_take_the_call_is_replaced(name: str, use: Use) -> None:
    """With one warning."""
    call = call_of(5, ints(0, 5), 5)
    with pytest.warns(UserWarning, match=f"'triton' replaces the engine '{name}': .* "):
        y, _ = run("cuda", call._replace(engine=name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, _ = run("cuda", call._replace(engine=name))
        expected, _ = run("cuda", call)
    assert torch.equal(y, expected) and torch.equal(again, expected)


def test_an_engine_that_fails_is_replaced_and_not_tried_again(use: Use) -> None:
    """For calls of the same form alone; memory that is used up is no failure."""
    engine = use("flash", error=RuntimeError("no plan"))
    call = call_of(5, ints(0, 5), 5, engine="flash")
    with pytest.warns(UserWarning, match="'triton' replaces the engine 'flash': RuntimeError: no"):
        y, _ = run("cuda", call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, _ = run("cuda", call._replace(cu_seqlens=ints(0, 2, 5)))
        expected, _ = run("cuda", call._replace(engine="triton"))
    assert engine.calls == 1 and torch.equal(y, expected) and not torch.equal(again, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run("cuda", call._replace(window_right=1))
    assert engine.calls == 2
    use("flash", error=torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError):
        run("cuda", call._replace(window_right=2))


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_what_an_engine_leaves_is_completed(dtype: torch.dtype, use: Use) -> None:
    """Sinks, tokens of no document, documents without keys, and windows that have none."""
    engine = use("cudnn")
    call = call_of(
        140, ints(1, 5, 5, 11, 135).to(dtype), 124, engine="cudnn", window_left=2, width=6, E=3,
        lengths=ints(0, 0, 3, 40).to(dtype), sinks=torch.tensor([0.5, -1.0], device=DEVICE),
    )  # fmt: skip
    dy = torch.randn(140, 2, 3, device=DEVICE)
    found = (*run("cuda", call), *gradients("cuda", call, dy))
    assert engine.calls == 3
    for a, b in zip(
        found, (*run("definition", call), *gradients("definition", call, dy)), strict=True
    ):
        torch.testing.assert_close(a, b)
    only = gradients("cuda", call, dy, (False, False, True, False))
    assert [x is not None for x in only] == [False, False, True, False]
    # An engine computes no gradient of sinks.
    calls = engine.calls
    only = gradients("cuda", call, dy, (False, False, False, True))
    torch.testing.assert_close(only[3], found[5])
    assert engine.calls == calls + 1


def test_a_document_longer_than_max_seqlen_is_nan_by_an_engine(use: Use) -> None:
    use("cudnn")
    call = call_of(9, ints(0, 2, 8), 5, engine="cudnn")
    assert run("cuda", call)[0].isnan().all()
    assert run("cuda", call._replace(max_seqlen=6))[0].isfinite().all()
    assert run("cuda", call._replace(engine="triton"))[0].isfinite().all()


@pytest.mark.device_kernels
@pytest.mark.parametrize("has_lengths", [False, True])
@pytest.mark.parametrize("engine", ["triton", "cudnn"])
def test_room_for_more_documents(use: Use, engine: str, has_lengths: bool) -> None:
    """A document for each token, most of them empty, and the numbers of those that are there."""
    if DEVICE == "cpu":
        use("cudnn")
    elif not cudnn_engine.is_installed():
        pytest.skip("nvidia-cudnn-frontend is not installed")
    T, end, dtype = 80, 77, torch.float32 if DEVICE == "cpu" else torch.bfloat16
    more = {"width": 16, "dtype": dtype, "engine": engine, "sinks": torch.ones(2).to(DEVICE)}
    for cuts in ((3, 40), (50, 60)):
        room, bounds = ints(2, *cuts, *[end] * (T - 2)), torch.tensor([3, 48])
        lengths = ints(1, 6, 9, *[0] * (T - 3)) if has_lengths else None
        call = call_of(T, room, T, lengths=lengths, **more)._replace(bounds=bounds)
        tight = call._replace(
            cu_seqlens=room[:4], lengths=None if lengths is None else lengths[:3], max_seqlen=48,
            bounds=None,
        )  # fmt: skip
        for one, other in zip(run("cuda", call), run("cuda", tight), strict=True):
            assert torch.equal(one, other)
        dy = torch.randn_like(call.query)
        pairs = zip(gradients("cuda", call, dy), gradients("cuda", tight, dy), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    # Of the engine's plan, too: a document that is longer than they say is not computed.
    short = run("cuda", call._replace(bounds=torch.tensor([3, 40]), engine="cudnn"))[0]
    assert short.isnan().all()


def test_cudnn_reads_tensors_by_their_strides() -> None:
    packed = torch.randn(6, 3, 2, 16, dtype=torch.bfloat16)
    aligned = packed[:, 1]
    assert cudnn_engine._aligned(aligned) is aligned
    for x in (packed[:, 1, :, 1:9], packed[..., ::2][:, 0], packed[:, 0, :1].expand(6, 2, 16)):
        copy = cudnn_engine._aligned(x)
        assert copy.is_contiguous() and torch.equal(copy, x)


def test_the_offsets_of_cudnns_documents() -> None:
    """Documents behind the last are empty, and bounds outside of the batch are its own."""
    rows = [torch.empty(9, 2, 4 + i) for i in range(8)]
    call = call_of(9, ints(1, 1, 4, 12), 8, lengths=ints(2, 2, 4))
    lengths, offsets = cudnn_engine.documents(call, rows, 4)
    assert lengths.tolist() == [[0, 3, 5, 0], [0, 2, 4, 0]]
    starts = torch.tensor([1, 1, 4, 9, 9])
    assert torch.equal(offsets, torch.stack([starts * x.stride(0) for x in rows]))


ENGINE_CASES = {
    "causal": {},
    "window": {"window_left": 20, "window_right": 3, "sinks_dtype": torch.float32},
    "all": {"window_right": -1, "documents": "gaps"},
    "lengths": {"has_lengths": True, "window_left": 30, "width": 32, "sinks_dtype": torch.float32},
    "large": {"shape": (300, 4, 256), "width": 256},
}


@ON_GPU
@pytest.mark.device_kernels
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("name", ENGINE_CASES)
@pytest.mark.parametrize("engine", ("triton", "cudnn", "flash"))
def test_every_engine_matches_truth(engine: str, name: str, dtype: torch.dtype) -> None:
    if engine == "cudnn" and not cudnn_engine.is_installed():
        pytest.skip("nvidia-cudnn-frontend is not installed")
    fields = {"shape": (300, 4, 64), "width": 64, **COMPILED, **ENGINE_CASES[name]}
    case = OP.case(**fields, dtype=dtype, engine=engine)
    arguments = FORWARD.arguments(*OP.forward_args(case, OP.tensors(case)))
    if engine != "triton" and varlen_attention.ENGINES_OF_OTHERS[engine].obstacle(arguments):
        pytest.skip("the engine does not take the call")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op_checks.assert_forward_matches_truth(OP, "cuda", case)
        op_checks.assert_backward_matches_truth(OP, "cuda", case)
        # With a warning, an engine that failed would have been replaced.
        short = arguments._replace(max_seqlen=2)
        assert bool(run("cuda", short)[0].isnan().all()) is (engine != "triton")


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has one of the two forms")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_what_is_for_hopper_gives_the_same_gradients(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"window_left": 5, "softcap": 3.0, "sinks": torch.ones(2)}
    call = call_of(90, ints(1, 4, 4, 80), 76, width=16, dtype=dtype, engine="triton", **more)
    dy = torch.randn_like(call.query)
    masks = ((True, True, True, True), (False, True, False, False), (False, False, True, False))
    apart = [gradients("cuda", call, dy, mask) for mask in masks]
    monkeypatch.setattr(varlen_kernels, "on_hopper", lambda x: True)
    joint = [gradients("cuda", call, dy, mask) for mask in masks]
    for one, other in zip(sum(apart, ()), sum(joint, ()), strict=True):
        assert (one is None) == (other is None)
        # Tiles of other sizes begin windows at other keys.
        assert one is None or (one - other).abs().max() <= 0.02 * other.abs().max()
