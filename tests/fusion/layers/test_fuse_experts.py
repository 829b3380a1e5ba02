"""`fuse` on experts as written in transformers, and their implementation by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

import small_configs
from called_ops import called
from gated_modules import HIDDEN, NO_OP, WIDTH
from graphs import Recorder, liger_ops_of
from liger_ops import fuse, unfuse
from liger_ops.fusion import versions
from liger_ops.integrations import transformers as by_name


def experts(
    gate: Callable[[Any, Tensor], Tensor] | None = None, activation: str = "silu"
) -> nn.Module:
    """A module as written in transformers, with `_apply_gate` if one is given."""

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = 3
            self.gate_up_proj = nn.Parameter(torch.randn(3, 2 * WIDTH, HIDDEN) / 4)
            self.down_proj = nn.Parameter(torch.randn(3, HIDDEN, WIDTH) / 4)
            self.act_fn = ACT2FN[activation]

        def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            y = torch.zeros_like(hidden)
            for i in range(index.shape[1]):
                gate_up = torch.einsum("mh,mwh->mw", hidden, self.gate_up_proj[index[:, i]])
                gate, up = gate_up.chunk(2, -1)
                gated = self.act_fn(gate) * up
                out = torch.einsum("mw,mhw->mh", gated, self.down_proj[index[:, i]])
                y = y + out * weights[:, i, None]
            return y

    if gate is not None:
        Experts._apply_gate = gate
    config = SimpleNamespace(_experts_implementation="batched_mm")
    return use_experts_implementation(Experts)(config)


def step(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return self.act_fn(gate).clamp(max=7.0) * up


def in_pairs(self: Any, gate_up: Tensor) -> Tensor:
    return F.silu(gate_up[..., ::2]) * gate_up[..., 1::2]


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize(
    ("gate", "activation", "options"),
    [
        (None, "silu", {"activation": "silu"}), (None, "gelu", {"activation": "gelu"}),
        (None, "gelu_pytorch_tanh", {"activation": "gelu_tanh"}),
        (in_pairs, "silu", {"activation": "silu", "interleaved": True}),
    ],
)  # fmt: skip
def test_experts(
    gate: Callable[[Any, Tensor], Tensor] | None, activation: str, options: dict[str, Any],
    implementation: str,
) -> None:  # fmt: skip
    module = experts(gate, activation)
    module.config._experts_implementation = implementation
    x = torch.randn(4, HIDDEN)
    index, weights = torch.tensor([[0, 2], [1, 2], [0, 1], [2, 1]]), torch.rand(4, 2)
    expected = module(x, index, weights)
    expected_grads = torch.autograd.grad(expected.square().sum(), list(module.parameters()))
    (entry,) = fuse(module).fused
    assert (entry.op, entry.options) == ("moe_experts", options)
    y = module(x, index, weights)
    torch.testing.assert_close(y, expected)
    grads = torch.autograd.grad(y.square().sum(), list(module.parameters()))
    torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-4)
    assert unfuse(module) == 1


def test_experts_near_misses() -> None:
    module = experts(step)
    assert [entry.reason for entry in fuse(module).left] == [NO_OP]
    module = experts(lambda self, gate_up: self.gate_up_proj @ gate_up)
    assert "its _apply_gate fails on fake tensors" in fuse(module).left[0].reason
    module = experts()
    module.act_fn.register_forward_hook(lambda *_: None)
    assert [entry.reason for entry in fuse(module).left] == [
        "act_fn, which would not be called, has hooks"
    ]


def test_eager_experts_that_have_the_activation_in_their_forward_are_left() -> None:
    module = experts()
    module.config._experts_implementation = "eager"
    report = fuse(module)
    assert not report
    assert "its experts_implementation is 'eager'" in report.left[0].reason
    x, index, weights = (
        torch.randn(4, HIDDEN),
        torch.zeros(4, 1, dtype=torch.long),
        torch.ones(4, 1),
    )
    eager = module(x, index, weights)
    module.config._experts_implementation = "batched_mm"
    assert len(fuse(module)) == 1
    torch.testing.assert_close(module(x, index, weights), eager)
    # The module's own code runs where the implementation was changed again.
    module.config._experts_implementation = "eager"
    assert torch.equal(module(x, index, weights), eager)


def test_class_of_another_make_is_not_undone() -> None:
    """A parametrization also changes the class; unfuse changes nothing until it is removed."""
    module = experts()
    model = nn.ModuleDict({"experts": module, "norm": nn.LayerNorm(8)})
    assert len(fuse(model)) == 2
    parametrize.register_parametrization(module, "down_proj", nn.Identity())
    norm = model["norm"]
    with pytest.raises(RuntimeError, match="the class of a ParametrizedExperts was changed"):
        unfuse(model)
    assert model["norm"] is norm
    parametrize.remove_parametrizations(module, "down_proj")
    assert unfuse(model) == 2


def tokens(count: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    index = torch.arange(2 * count).remainder(3).reshape(count, 2)
    return torch.randn(count, HIDDEN), index, torch.rand(count, 2)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_that_of_the_implementation(implementation: str, dtype: torch.dtype) -> None:
    """grouped_mm computes in the dtype of the weights, and batched_mm in autocast's."""
    module = experts().to(dtype)
    exact = copy.deepcopy(module).double()
    module.config._experts_implementation = implementation
    given = tokens()
    found = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            y = module(*given)
        found.append((y.detach(), *torch.autograd.grad(y.sum(), list(module.parameters()))))
        fuse(module)
    rough = torch.bfloat16 in (dtype, None if implementation == "grouped_mm" else torch.bfloat16)
    bounds = {"rtol": 3e-2, "atol": 3e-2} if rough else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found[1], found[0], **bounds)
    x, index, weights = given
    truth = exact(x.to(dtype).double(), index, weights.double())
    error = float((found[1][0].double() - truth).norm() / truth.norm())
    assert (error > 1e-4) is rough


# Dynamo of torch 2.11 calls no function of a module while it traces.
TRACES_BY_NAME = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="compiled by name, experts need torch 2.13"
)


@pytest.mark.parametrize("name", [None, pytest.param("liger", marks=TRACES_BY_NAME)])
def test_changing_numbers_of_tokens_are_one_graph(name: str | None) -> None:
    recorder, module = Recorder(), experts()
    if name:
        by_name.install()
        module.config._experts_implementation = name
    else:
        fuse(module)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=recorder.backend())
    for count in (4, 7, 9):
        given = tokens(count)
        y = compiled(*given)
        torch.testing.assert_close(y, module(*given))
        y.sum().backward()
    assert liger_ops_of(recorder.forwards) == {"moe_experts_forward": 1}


def test_sentinels_of_expert_parallelism() -> None:
    """A rank holds some experts, and the ids of the others are one more than the last."""
    module, fused = experts(), experts()
    fused.load_state_dict(module.state_dict())
    module._is_expert_parallel = fused._is_expert_parallel = True
    fuse(fused)
    x, index, weights = tokens()
    index[:, 0] = 3
    weights.requires_grad_()
    found = []
    for one in (module, fused):
        # As routers mask them. transformers 5.17 has a gradient of their weights behind the mask.
        y = one(x, index, weights.masked_fill(index == 3, 0.0))
        found.append((y.detach(), *torch.autograd.grad(y.sum(), [weights, *one.parameters()])))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_parameters_that_are_computed() -> None:
    """As by parametrizations, with which peft adapts weights of experts."""
    module, given = experts(), tokens()
    fuse(module)
    parametrize.register_parametrization(module, "gate_up_proj", nn.Softplus())
    (y, *_), ops = called(module, *given)
    assert ops == {"moe_experts_forward": 1}
    module.config._experts_implementation = "eager"
    torch.testing.assert_close(y, module(*given))


def test_attributes_that_only_some_versions_have() -> None:
    """transformers 5.17 has no has_post_expert_norm."""
    module, given = experts(), tokens()
    expected = module(*given)
    for name in versions.DEFAULTS.keys() & vars(module).keys() - {"config", "num_experts"}:
        delattr(module, name)
    assert fuse(module).counts() == {"moe_experts": 1}
    torch.testing.assert_close(module(*given), expected)


def left_reason(module: nn.Module) -> str:
    return " ".join(entry.reason for entry in fuse(module).left)


def test_products_that_are_left() -> None:
    module = experts()
    module.has_post_expert_norm = True
    assert "only its activation is fused: its experts have a norm after" in left_reason(module)
    module = experts()
    module.config._experts_implementation = "sonicmoe"
    assert "its experts_implementation is 'sonicmoe'" in left_reason(module)
    module = experts()
    module.gate_up_proj = type("Quantised", (nn.Parameter,), {})(module.gate_up_proj.data)
    assert "gate_up_proj is a Quantised, not a plain Parameter" in left_reason(module)
    module = experts()
    module.forward = module.forward
    assert "the instance has a forward of its own" in left_reason(module)
    for activation, reason in (("silu", NO_OP), ("relu2", "and it has no parameter up_proj")):
        module = experts(activation=activation)
        module.has_gate = False
        assert reason in left_reason(module)


def test_the_implementation_by_name() -> None:
    by_name.install()
    by_name.install()
    module, given = experts(), tokens()
    expected = module(*given)
    module.config._experts_implementation = "liger"
    torch.testing.assert_close(module(*given), expected)
    # The activation is recognised again once an attribute that it reads was changed.
    module.act_fn = ACT2FN["gelu"]
    changed = module(*given)
    module.config._experts_implementation = "batched_mm"
    torch.testing.assert_close(changed, module(*given))
    module.config._experts_implementation = "liger"
    module.has_post_expert_norm = True
    with pytest.raises(ValueError, match="'liger': Experts cannot be .* have a norm after them"):
        module(*given)
    module = experts(step)
    module.config._experts_implementation = "liger"
    with pytest.raises(ValueError, match=f"cannot be computed by moe_experts: {NO_OP}"):
        module(*given)
    by_name.uninstall()
    with pytest.raises(KeyError, match="liger"):
        module(*given)


# The model types of transformers, and whether they have a loss of their routers.
FAMILIES = {
    "mixtral": True, "qwen2_moe": True, "qwen3_moe": True, "qwen3_next": True, "gpt_oss": True,
    "deepseek_v2": False, "deepseek_v3": False, "deepseek_v4": True, "olmoe": True,
    "phimoe": True, "glm4_moe": False, "granitemoe": True, "hunyuan_v1_moe": False,
    "ernie4_5_moe": True, "minimax_m2": True, "nemotron_h": False, "qwen3_5_moe_text": True,
    "llama4_text": False,
}  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_step_of_every_family(model_type: str) -> None:
    """The loss and every gradient are those of the untouched model, whose experts run grouped_mm,
    and of its eager experts in float64, in training and in evaluation."""
    torch.manual_seed(0)
    chosen = {"num_experts_per_tok": 2} if model_type == "deepseek_v2" else {}
    config = small_configs.small(model_type, output_router_logits=True, **chosen)
    model = AutoModelForCausalLM.from_config(config).train()
    fused = copy.deepcopy(model)
    report = fuse(fused, attention=False)
    counts = report.counts()
    assert counts["moe_experts"] >= 1 and counts.get("router_losses", 0) == FAMILIES[model_type]
    assert not [entry for entry in report.left if "xperts" in entry.class_name]
    x = torch.randint(1, 60, (2, 9))
    mask = torch.ones_like(x)
    mask[0, :3] = 0
    for dtype in (torch.float32, torch.float64):
        if dtype is torch.float64:
            model.set_experts_implementation("eager")
        found = []
        for one in (model, fused):
            one.to(dtype).zero_grad()
            try:
                loss = one(input_ids=x, labels=x, attention_mask=mask).loss
            except AttributeError as error:
                # GraniteMoe's in transformers 5.17, which records no router's logits.
                if one is model:
                    pytest.skip(f"this version of transformers cannot train the model: {error}")
                raise
            loss.backward()
            found.append((loss.detach(), *(p.grad for p in one.parameters())))
        # Routers and norms of models compute in float32.
        torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=2e-5)
    with torch.no_grad():
        logits = [
            one.float().eval()(input_ids=x, attention_mask=mask).logits for one in (model, fused)
        ]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_a_compiled_step_is_one_graph() -> None:
    """With a loss of its routers, for changing numbers of tokens."""
    config = small_configs.small("qwen3_moe", output_router_logits=True)
    model, recorder = AutoModelForCausalLM.from_config(config), Recorder()
    fuse(model, attention=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=recorder.backend())
    for length in (7, 11, 12):
        x = torch.randint(1, 60, (2, length))
        given = {"input_ids": x, "labels": x, "attention_mask": torch.ones_like(x)}
        # The first eager call has transformers register hooks, which would break a graph.
        expected = model(**given).loss
        torch.testing.assert_close(compiled(**given).loss, expected)
    ops = liger_ops_of(recorder.forwards)
    assert (ops["moe_experts_forward"], ops["router_losses_forward"]) == (2, 1)
