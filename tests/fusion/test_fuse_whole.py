"""`fuse` changes a model completely or not at all, and only the kinds of parts asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from causal_models import batch, pair
from fused_families import output
from fused_models import LLAMA, QWEN3_MOE
from gated_modules import HIDDEN, NO_OP, WIDTH
from liger_ops import fuse
from liger_ops.fusion import FuseReport, classes
from liger_ops.fusion.layers.gated import GatedMLPs
from liger_ops.fusion.layers.norms import Norms


class Pair(nn.Module):
    """Two projections with a tuple for a result, as in the feature projection of wav2vec2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        return self.second(x), x


class GivesPairMLP(Pair):
    """Projects a result that is not a tensor, and has a name that a reader looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Any:
        return self.second((self.first(x), self.gate(x)))


class NoProjectionMLP(nn.Module):
    """Its projection holds no parameter, as a linear layer after quantisation."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate_proj(x)


def test_modules_of_other_kinds_of_results_are_left() -> None:
    model = nn.ModuleDict({"pair": Pair(), "mlp": GivesPairMLP(), "none": NoProjectionMLP()})
    report = fuse(model)
    assert not report
    assert [(entry.where, entry.reason) for entry in report.left] == [
        ("mlp", NO_OP),
        ("none", "it has 0 children that may be projections"),
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dynamically_quantised_model() -> None:
    model = LLAMA.model().eval()
    model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    x = LLAMA.inputs(torch.float32)
    expected = output(model, x)
    assert len(fuse(model)) >= 5
    torch.testing.assert_close(output(model, x), expected)


def failing(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("out of luck\nand more of it")


@pytest.mark.parametrize(
    ("where", "name", "kind", "reason"),
    [
        (Norms, "derive_facts", "norm", "its probe failed: ValueError: out of luck"),
        (Norms, "key", "norm", "it cannot be probed: ValueError: out of luck"),
        (
            GatedMLPs,
            "derive_facts",
            "gated activation",
            "its probe failed: ValueError: out of luck",
        ),
        (GatedMLPs, "obstacle", "gated activation", "it cannot be probed: ValueError: out of luck"),
    ],
)
def test_what_cannot_be_probed_is_left(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, kind: str, reason: str
) -> None:
    monkeypatch.setattr(where, name, failing)
    report = fuse(LLAMA.model())
    assert kind not in {entry.kind for entry in report.fused}
    assert len(report) > 0
    by_path = {entry.where: entry for entry in report.left if entry.reason == reason}
    path = "model.norm" if where is Norms else "model.layers.1.mlp"
    assert by_path[path].class_name == ("LlamaRMSNorm" if where is Norms else "LlamaMLP")


def structure(model: nn.Module) -> list[tuple[str, int, type]]:
    return [(name, id(module), type(module)) for name, module in model.named_modules()]


@pytest.mark.parametrize("count", range(4))
def test_an_error_changes_nothing(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The error occurs after each possible number of changed modules."""
    model = LLAMA.model()
    before = structure(model)
    override = classes.override
    calls = []

    def stopping(*args: Any) -> None:
        calls.append(args)
        if len(calls) > count:
            raise KeyboardInterrupt("now")
        override(*args)

    monkeypatch.setattr(classes, "override", stopping)
    with pytest.raises(KeyboardInterrupt, match="now"):
        fuse(model)
    assert structure(model) == before
    monkeypatch.undo()
    assert len(fuse(model)) == 10


OPS_OF = {
    "norms": {"rms_norm"}, "activations": {"swiglu", "moe_experts"}, "rope": {"rope"},
    "loss": {"linear_cross_entropy", "router_losses"},
}  # fmt: skip


@pytest.mark.parametrize("name", OPS_OF)
@pytest.mark.parametrize("build", [LLAMA.model, QWEN3_MOE.model], ids=["mlps", "experts"])
def test_each_part_can_be_left_out(build: Callable[[], nn.Module], name: str) -> None:
    everything = {entry.op for entry in fuse(build()).fused}
    report = fuse(build(), attention=False, **{name: False})
    assert {entry.op for entry in report.fused} == everything - OPS_OF[name]
    assert not report.left
    others = {other: False for other in OPS_OF if other != name}
    assert {entry.op for entry in fuse(build(), **others).fused} == everything & OPS_OF[name]


def test_parts_can_be_fused_one_after_the_other() -> None:
    model = LLAMA.model()
    counts = [len(fuse(model, loss=False, norms=False)), len(fuse(model)), len(fuse(model))]
    assert counts == [4, 6, 0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chunk_bytes", r"The forward of the fused model takes it: model\(\*\*batch, chunk_bytes="),
        ("norm", "accepted are model, norms, .*Did you mean norms"),
        ("anything", "accepted are model, norms, .*hyper_connections, lora, verify$"),
    ],
)
def test_an_unknown_argument(name: str, text: str) -> None:
    with pytest.raises(TypeError, match=f"fuse: {name} is not an argument; .*{text}"):
        fuse(LLAMA.model(), **{name: 1})


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, 8)).unbind(-3)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(-2)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.head = nn.Linear(8, 11)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers[1](self.layers[0](self.embedding(words))))


def test_what_is_not_looked_for_in_other_models_is_said() -> None:
    report = fuse(LanguageModel())
    assert [(one.kind, one.where) for one in report.left] == [
        ("rotary embedding", "layers.0"),
        ("attention", "layers.0"),
        ("rotary embedding", "layers.1"),
        ("attention", "layers.1"),
        ("loss", "head"),
    ]
    assert all("torch.compile(model, backend='liger')" in one.reason for one in report.left)
    assert [one.kind for one in fuse(LanguageModel(), rope=False, loss=False).left] == [
        "attention",
        "attention",
    ]
    # Models of transformers have findings of their own.
    assert not any("enable" in str(one.reason) for one in fuse(LLAMA.model()).findings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_logits_that_a_fused_loss_does_not_keep(dtype: torch.dtype) -> None:
    model = LLAMA.model().to(dtype)
    words = model.lm_head.weight.shape[0]
    report = fuse(model)
    (loss,) = (one for one in report.fused if one.kind == "loss")
    assert loss.logits_bytes == words * (dtype.itemsize + 4)
    assert f"{loss.logits_bytes / 1000:.1f} MB of logits" in " ".join(str(report).split())


@pytest.mark.parametrize("name", OPS_OF)
def test_switches_are_bools(name: str) -> None:
    model = LLAMA.model()
    before = structure(model)
    with pytest.raises(TypeError, match=rf"fuse: {name} must be True or False, got 'no'"):
        fuse(model, **{name: "no"})
    assert structure(model) == before
    assert fuse(nn.Linear(2, 2), **dict.fromkeys(OPS_OF, False)) == FuseReport()


def test_the_model_itself_has_a_place_in_the_table() -> None:
    text = str(fuse(nn.LayerNorm(8)))
    assert text.splitlines()[-2:] == [
        "      (the model itself)",
        "  Nothing is faster on cpu, where there are no kernels.",
    ]


def test_flops_of_a_step_are_those_of_the_untouched_model() -> None:
    untouched, fused = pair()
    fuse(fused)
    counts = []
    for model in (untouched, fused):
        with FlopCounterMode(display=False) as counter:
            model(**batch()).loss.backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
