"""moe_experts, found where rows are gathered, as in transformers' grouped_mm and batched_mm."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN
from transformers.integrations import moe
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from rewriting import Rewriter, check, values

FOUND = {"moe_experts": 1}
T, K, E, D, WIDTH = 5, 2, 4, 8, 16
OP = "moe_experts"
each_implementation = pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])


@pytest.fixture(autouse=True)
def products_of_any_dtype(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers compute grouped_mm by its own operator, as in the graphs that it compiles in
    other dtypes than bfloat16: PyTorch's takes no float64, with which the results are compared."""
    if "natively" not in request.node.name:
        monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)


class Layer(nn.Module):
    """Experts, and a router that chooses the same of them in every dtype."""

    def __init__(self, experts: nn.Module, implementation: str) -> None:
        super().__init__()
        self.experts = experts
        experts.config._experts_implementation = implementation  # type: ignore[union-attr]
        for i, parameter in enumerate(self.parameters()):
            parameter.data = values(*parameter.shape, seed=i).detach().bfloat16().float() / 2
        self.register_buffer("router", torch.eye(E))

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        chosen = torch.topk(F.linear(logits, self.router), K, dim=-1)
        return self.experts(x, chosen.indices, self.scores(chosen.values))

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


class WideScores(Layer):
    """Layer with scores in float32, as in DeepSeek-V3, that are divided in place."""

    def scores(self, logits: Tensor) -> Tensor:
        scores = logits.float().sigmoid() * 2.5
        scores /= scores.sum(-1, keepdim=True)
        return scores


def experts(
    activation: str = "silu", gate: Callable[..., Tensor] | None = None, has_gate: bool = True
) -> nn.Module:
    """A module as written in transformers, with `_apply_gate` if one is given."""

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = E
            rows = 2 * WIDTH if has_gate else WIDTH
            up = nn.Parameter(torch.empty(E, rows, D))
            self.gate_up_proj, self.up_proj = (up, None) if has_gate else (None, up)
            self.down_proj = nn.Parameter(torch.empty(E, D, WIDTH))
            self.act_fn = ACT2FN[activation]

        def forward(self, *args: Tensor) -> None: ...

    if gate is not None:
        Experts._apply_gate = gate  # type: ignore[attr-defined]
    return moe.use_experts_implementation(Experts, has_gate=has_gate)(SimpleNamespace())


def gpt_oss() -> nn.Module:
    config = GptOssConfig(num_local_experts=E, hidden_size=D, intermediate_size=WIDTH)
    made = GptOssExperts(config)
    made.limit = 1.0
    return made


def in_pairs(self: Any, gate_up: Tensor) -> Tensor:
    return gate_up[..., 1::2] * F.silu(gate_up[..., ::2])


def given(tokens: int = T, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return values(tokens, D, dtype=dtype), values(tokens, E, dtype=torch.bfloat16).to(dtype)


CODE: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "silu": (experts, {"activation": "silu", "interleaved": False}),
    "gelu": (functools.partial(experts, "gelu_pytorch_tanh"), {"activation": "gelu_tanh"}),
    "pairs": (functools.partial(experts, gate=in_pairs), {"interleaved": True}),
    "no-gate": (
        functools.partial(experts, "relu2", has_gate=False), {"activation": "relu_squared"}
    ),
    "gpt-oss": (gpt_oss, {"activation": "clamped_swiglu", "limit": 1.0, "interleaved": True}),
}  # fmt: skip


@pytest.mark.quick(rewrites=("moe_experts",))
@each_implementation
@pytest.mark.parametrize(("make", "options"), CODE.values(), ids=CODE)
def test_experts(make, options, implementation):
    found = check(Layer(make(), implementation), *given(), names=(OP,), counts=FOUND)
    (call,) = found.calls(OP)
    assert {name: call[name] for name in options} == options
    assert (call["gate_up_bias"] is None) == (make is not gpt_oss)
    code = found.graphs[0].code
    assert not any(name in code for name in ("sort", "grouped", "bmm", "add_", "setitem"))


@each_implementation
def test_changing_numbers_of_tokens(implementation):
    layer = Layer(gpt_oss(), implementation)
    check(layer, *given(), then=given(3), names=(OP,), counts=FOUND, dynamic=True)


@each_implementation
def test_natively_in_bfloat16(implementation):
    """The sum of float32 is rounded once in the code and by the op."""
    layer = WideScores(experts(), implementation).bfloat16()
    check(layer, *given(dtype=torch.bfloat16), names=(OP,), counts=FOUND)


def test_autocast():
    """grouped_mm computes in the dtype of its weights, whatever autocast's is."""

    class Autocast(Layer):
        def forward(self, x: Tensor, logits: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x, logits)

    check(Autocast(experts(), "grouped_mm"), *given(), names=(OP,), counts=FOUND)


def test_batched_products_under_autocast():
    layer = Layer(experts(), "batched_mm")
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=(rewriter := Rewriter((OP,))), fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, own = (one(*given()) for one in (compiled, layer))
    assert rewriter.counts() == FOUND and found.dtype is own.dtype
    torch.testing.assert_close(found, own, rtol=0.02, atol=0.02 * own.abs().max().item())


def test_a_wide_sum_of_narrow_products_is_left():
    layer, rewriter = WideScores(experts(), "batched_mm"), Rewriter((OP,))
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(layer, backend=rewriter, fullgraph=True)(*given())
    (reason,) = rewriter.reasons(OP)
    assert "its sum stays in torch.float32" in reason


def test_a_checkpointed_block():
    layer = Layer(gpt_oss(), "grouped_mm")

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, logits: Tensor) -> Any:
            return checkpoint(self.layer, x * 2, logits, use_reentrant=False)

    found = check(Checkpointed(), *given(), names=(OP,), counts=FOUND)
    assert any("checkpoint" in str(node.target) for node in found.nodes())


@each_implementation
def test_sentinels(implementation):
    """Ids from E on are those of the experts of other ranks."""
    layer = Layer(gpt_oss(), implementation).experts
    layer._is_expert_parallel = True
    ids = torch.tensor([[0, E], [E, 2], [E, E], [1, 3], [3, E]])
    scores = values(T, K).detach().where(ids < E, 0.0).requires_grad_()
    if implementation == "grouped_mm":
        check(layer, values(T, D), ids, scores, names=(OP,), counts=FOUND)
    else:
        compiled = torch.compile(layer, backend=(rewriter := Rewriter((OP,))))
        compiled(values(T, D), ids, scores)
        (reason,) = rewriter.reasons(OP)
        assert "one may be a sentinel" in reason


def test_weights_that_are_computed():
    """As peft forms those with a LoRA: the op reads the sums."""
    base, a, b = values(E, 2 * WIDTH, D), values(E, 2, D), values(E, 2 * WIDTH, 2)

    def with_lora(down: Tensor, base: Tensor, a: Tensor, b: Tensor, *others: Tensor) -> Tensor:
        return grouped(*others, base + 0.5 * torch.bmm(b, a), down)

    check(with_lora, values(E, D, WIDTH), base, a, b, *given(), names=(OP,), counts=FOUND)


def gated(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def same(x: Any, *others: Any) -> Any:
    return x


def grouped(
    x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor,
    act: Callable[[Tensor], Tensor] = gated, most: int = E - 1, per: int = K,
    descending: bool = False, inverse: Callable[[Tensor, Tensor], Tensor] = same,
    rows: Callable[[Tensor], Any] = same, after: Callable[[Tensor], Any] = same,
    results: Callable[[Tensor], Any] = same, weigh: Callable[[Tensor], Tensor] = same,
    total: Callable[[Tensor], Tensor] = lambda rows: rows.sum(1),
) -> Tensor:  # fmt: skip
    """Compute experts as transformers' grouped_mm does, with variations."""
    product = torch.ops.transformers.grouped_mm_fallback
    ids = logits.topk(K).indices
    sorted_ids, order = torch.sort(ids.reshape(-1), descending=descending)
    selected = x[order // per]
    scores = weigh(logits.topk(K).values.softmax(-1)).reshape(-1)[order]
    counts = torch.histc(sorted_ids.float(), bins=E, min=0, max=most)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    rows(selected)
    h = product(selected, gate_up.transpose(-2, -1), offs=ends)
    after(h)
    y = results(product(act(h), down.transpose(-2, -1), offs=ends))
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    weighted = (y * scores.unsqueeze(-1))[inverse(back, order)]
    return total(weighted.view(x.shape[0], K, -1))


def gate_written(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    gate = F.silu(gate)
    gate.mul_(2)
    return gate * up


def activation_written(h: Tensor) -> Tensor:
    act = gated(h)
    act.mul_(2)
    return act


def used(x: Tensor, *args: Tensor) -> Any:
    kept: list[Tensor] = []
    y = grouped(x, *args, after=kept.append)
    return y, kept[0] * 2


def written(x: Tensor, *args: Tensor) -> Tensor:
    x = x * 1.0
    return grouped(x, *args, rows=lambda selected: x.mul_(2))


def with_view(x: Tensor, *args: Tensor) -> Any:
    kept: list[Tensor] = []
    y = grouped(x, *args, after=lambda h: kept.append(h[:1].add_(1)))
    return y


partial = functools.partial
NEAR_MISSES: dict[str, tuple[Callable[..., Any], str]] = {
    "groups": (partial(grouped, most=E + 1), "its groups are not those of the experts"),
    "tokens": (partial(grouped, per=1 + K), "its rows are not those of each token"),
    "order": (partial(grouped, descending=True), "its rows are not in one order"),
    "inverse": (partial(grouped, inverse=lambda back, order: order), "is not the setitem"),
    "written-order": (
        partial(grouped, inverse=lambda back, order: back.clamp_(max=6)), "is not the setitem"
    ),
    "rows": (partial(grouped, rows=lambda rows: rows.mul_(2)), "is not the rows"),
    "part": (with_view, "written in place"),
    "bias": (partial(grouped, after=lambda h: h.add_(1.0)), "is not the rows"),
    "norm": (
        partial(grouped, results=lambda y: F.rms_norm(y, (D,))), "is not the grouped_mm"
    ),
    "halves": (
        partial(grouped, act=lambda h: h.chunk(2, -1)[0] * F.silu(h.chunk(2, -1)[1])),
        "its gate and up are not the first and the second half",
    ),
    "activation": (
        partial(grouped, act=lambda h: h.chunk(2, -1)[1] * torch.tanh(h.chunk(2, -1)[0])),
        "no activation of the op",
    ),
    "maximum": (partial(grouped, total=lambda rows: (rows * 2).sum(1)), "is not the view"),
    "mean": (partial(grouped, total=lambda rows: rows.sum(1, keepdim=True)), "its sum is not"),
    "gate": (partial(grouped, act=gate_written), "is used elsewhere, by mul_"),
    "act": (partial(grouped, act=activation_written), "no activation of the op"),
    "used": (used, "is used elsewhere"),
    "written": (written, "written in place"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses(function, reason):
    inputs = *given(), values(E, 2 * WIDTH, D), values(E, D, WIDTH)
    # The results are not compared: the operator leaves rows of no group as they are.
    rewriter = Rewriter((OP,))
    torch._dynamo.reset()
    torch.compile(function, backend=rewriter, fullgraph=True)(*inputs)
    assert not rewriter.counts() and len(rewriter.reasons(OP)) == 1
    assert reason in rewriter.reasons(OP)[0]


def test_the_code_of_the_near_misses():
    """Also with scores of any kind, which are an input of the op."""
    function = partial(grouped, weigh=lambda scores: scores[:, :1].expand(-1, K))
    check(function, *given(), values(E, 2 * WIDTH, D), values(E, D, WIDTH), counts=FOUND)
