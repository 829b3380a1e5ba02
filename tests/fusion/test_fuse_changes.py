"""The changes that `fuse` makes to a model, its report, and everything that it leaves unchanged."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

import adaptive_norms as adaptive
import rotating_modules as rotating
from causal_models import batch
from fused_families import Family, output
from fused_models import FAMILY, LLAMA, fused_modules, results
from gated_modules import HIDDEN, WIDTH, Limited
from hyper_connections import CONFIG, HC
from hyper_connections import HIDDEN as STREAM
from liger_ops.fusion import FuseReport, fuse, unfuse


@FAMILY
def test_parameters_are_the_same_objects(family: Family) -> None:
    model = family.model()
    first = next(module for module in model.modules() if "Norm" in type(module).__name__)
    first.requires_grad_(False)
    before, flags = dict(model.named_parameters()), {}
    for name, parameter in before.items():
        flags[name] = parameter.requires_grad
    state = copy.deepcopy(model.state_dict())
    assert fuse(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert {name: parameter.requires_grad for name, parameter in after.items()} == flags
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_module_in_two_places_stays_one() -> None:
    norm, other = nn.LayerNorm(8), nn.LayerNorm(8)
    other.weight = norm.weight
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm), "tied": other})
    assert len(fuse(model)) == 2
    assert model["a"] is model["b"][0]
    assert model["a"] is not model["tied"]
    assert model["a"].weight is model["tied"].weight
    unfuse(model)
    assert model["a"] is model["b"][0] is norm
    assert model["tied"] is other


def test_training_mode_is_kept() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    model[0].eval()
    fuse(model)
    assert [module.training for module in model] == [False, True]


def test_only_the_given_model_changes() -> None:
    one, two = LLAMA.model(), LLAMA.model()
    x = LLAMA.inputs(torch.float32)
    before, loss_function = output(two, x), two.loss_function
    classes = {name: type(module) for name, module in two.named_modules()}
    forward = transformers.models.llama.modeling_llama.LlamaRMSNorm.forward
    assert fuse(one)
    assert {name: type(module) for name, module in two.named_modules()} == classes
    assert transformers.models.llama.modeling_llama.LlamaRMSNorm.forward is forward
    assert two.loss_function is loss_function and torch.equal(output(two, x), before)
    assert (one(**batch()).logits is None) and two(**batch()).logits is not None
    assert not fused_modules(LLAMA.model())


def test_second_call_replaces_nothing() -> None:
    model = LLAMA.model()
    assert len(fuse(model)) == 10
    cls, modules = type(model), dict(model.named_modules())
    report = fuse(model, attention=False)
    assert not report
    assert report == FuseReport()
    assert all(module is modules[name] for name, module in model.named_modules())
    assert type(model) is cls


def test_random_state_and_global_modes_are_kept() -> None:
    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rand(())

    model = nn.Sequential(nn.LayerNorm(8), nn.Dropout(), nn.RMSNorm(8, eps=1e-6), Drawing())
    torch.manual_seed(3)
    state = torch.get_rng_state()
    report = fuse(model)
    assert len(report) == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_under_another_mode(mode: Callable[[], Any]) -> None:
    model = LLAMA.model()
    with mode(), torch.device("meta"):
        assert len(fuse(model)) == 10
    x = LLAMA.inputs(torch.float32)
    assert results(model, x).keys() == results(LLAMA.model(), x).keys()


def test_report_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    layers = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8), LlamaRMSNorm(8)])
    model = nn.ModuleDict({"layers": layers, "norm": nn.RMSNorm(8)})
    report = fuse(model)
    assert len(report) == 3
    assert str(report).splitlines() == [
        "3 ops used",
        "  2 x layer_norm(eps=1e-05): LayerNorm",
        "      layers.*",
        "  1 x rms_norm(eps=1e-06, offset=0.0, casting_mode='llama'): LlamaRMSNorm",
        "      layers.2",
        "  Nothing is faster on cpu, where there are no kernels.",
        "1 place left",
        "  1 x RMSNorm: rms_norm: eps=None is the dtype's own epsilon, which the op does not",
        "      support",
        "      norm",
    ]
    assert report.counts() == {"layer_norm": 2, "rms_norm": 1}
    assert "faster" not in str(fuse(nn.LayerNorm(8, device="meta")))
    nothing = str(fuse(nn.Linear(2, 2), rope=False)).splitlines()
    assert nothing[0] == "0 ops used"
    looked_for = "norms, activations, attention, loss, hyper_connections"
    assert nothing[1] == f"  looked for: {looked_for}"
    assert "liger_ops.explain(model, *inputs)" in nothing[2]


@pytest.mark.parametrize("function", [fuse, unfuse])
def test_needs_a_module(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        function([nn.LayerNorm(8)])


@pytest.mark.parametrize("verify", [True, False])
def test_verify_needs_a_batch(verify: bool) -> None:
    model = nn.LayerNorm(8)
    with pytest.raises(TypeError, match=r"fuse: verify must be a batch.*explain\(model, \*\*batch"):
        fuse(model, verify=verify)
    assert type(model) is nn.LayerNorm


class MLP(nn.Module):
    """A gated MLP that reads a configuration and drops elements."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH)
        self.down = nn.Linear(WIDTH, HIDDEN)
        self.act, self.drop = nn.SiLU(), nn.Sequential(nn.Dropout(0.0))
        self.bias: nn.Module | None = None
        self.config = SimpleNamespace(activation="silu", factors=[1.0])

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        gate = self.act(gate) if self.config.activation == "silu" else torch.tanh(gate)
        y = self.drop(self.scaled(gate * up))
        return self.down(y if self.bias is None else self.bias(y))

    def scaled(self, y: Tensor) -> Tensor:
        if hasattr(self, "extra") or getattr(self.config, "extra", None) is not None:
            return torch.tanh(y)
        for factor in self.config.factors:
            y = y if factor == 1.0 else y * factor
        return y


class Experts(GptOssExperts):
    """The activation alone, without the weights of experts."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.alpha, self.limit = 1.702, 7.0

    def forward(self, x: Tensor) -> Tensor:
        return self._apply_gate(x)


def doubled(module: nn.Module, *args: Any) -> Any:
    """Twice the last argument: the results, the inputs or the gradients that a hook is given."""
    last = args[-1]
    return 2 * last if isinstance(last, Tensor) else tuple(2 * one for one in last)


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def sets(path: str, value: Any) -> Callable[[Any], None]:
    """A change: an attribute of a module or of what it holds gets another value."""
    *names, last = path.split(".")

    def change(module: Any) -> None:
        for name in names:
            module = getattr(module, name)
        setattr(module, last, copy.deepcopy(value))

    return change


def hooks(path: str) -> dict[str, Callable[[Any], None]]:
    """Changes: each kind of hook on a child, and a forward of its own."""
    kinds = {
        "forward-hook": "register_forward_hook", "pre-hook": "register_forward_pre_hook",
        "backward-hook": "register_full_backward_hook",
    }  # fmt: skip

    def hook(name: str) -> Callable[[Any], None]:
        return lambda module: getattr(module.get_submodule(path), name)(doubled)

    def patched(module: Any) -> None:
        module.get_submodule(path).forward = torch.sinh

    return {
        **{f"{path}-{kind}": hook(name) for kind, name in kinds.items()},
        f"{path}-forward": patched,
    }


def weight_doubled(path: str) -> Callable[[Any], None]:
    return lambda module: parametrize.register_parametrization(
        module.get_submodule(path), "weight", Double()
    )


def appends(module: Any) -> None:
    module.drop.append(Double())


def streams() -> Tensor:
    return torch.randn(2, 3, HC, STREAM)


def connection() -> nn.Module:
    made = DeepseekV4HyperConnection(CONFIG)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


X = torch.randn(2, 5, HIDDEN)
# What is fused, its inputs, and changes that it has to notice.
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any]]] = {
    "mlp": (
        MLP,
        lambda: (torch.randn(2, 5, HIDDEN),),
        {
            "dropout": sets("drop.0.p", 0.5), "another-act": sets("act", nn.GELU()),
            "config": sets("config.activation", "tanh"), "list": sets("config.factors", [3.0]),
            "added": sets("extra", 1.0), "added-to-config": sets("config.extra", 1.0),
            "another-config": sets("config", SimpleNamespace(activation="tanh", factors=[])),
            "method": sets("scaled", torch.sin), "child": sets("bias", nn.Linear(WIDTH, WIDTH)),
            "appended": appends, **hooks("act"), **hooks("drop.0"),
        },
    ),
    "limited-mlp": (
        Limited, lambda: (9 * torch.randn(2, 5, HIDDEN),),
        {"limit": sets("limit", 1.0), "alpha": sets("alpha", 2.0)},
    ),
    "experts": (
        Experts, lambda: (9 * torch.randn(5, 2 * WIDTH),), {"limit": sets("limit", 1.0)},
    ),
    "norm": (
        lambda: LlamaRMSNorm(HIDDEN), lambda: (torch.randn(2, 5, HIDDEN),),
        {
            "eps": sets("variance_epsilon", 0.5), "weight": sets("weight", nn.Parameter(X[0, 0])),
            "forward": sets("forward", torch.sinh), "parametrization": weight_doubled(""),
            **hooks(""),
        },
    ),
    "layer-norm": (
        lambda: nn.LayerNorm(HIDDEN), lambda: (torch.randn(2, 5, HIDDEN),),
        {"no-bias": sets("bias", None), "eps": sets("eps", 0.5)},
    ),
    "gated-norm": (
        lambda: Qwen3NextRMSNormGated(HIDDEN),
        lambda: (torch.randn(2, 5, HIDDEN), torch.randn(2, 5, HIDDEN)),
        {"eps": sets("variance_epsilon", 0.5)},
    ),
    "modulated-norm": (
        lambda: adaptive.Zero(nn.LayerNorm(adaptive.N, elementwise_affine=False)),
        lambda: (
            torch.randn(2, adaptive.T, adaptive.N), None, None, torch.randn(2, adaptive.C),
        ),
        {
            "eps": sets("norm.eps", 0.5), "another-norm": sets("norm", nn.RMSNorm(adaptive.N)),
            **hooks("norm"),
        },
    ),
    "hyper-connection": (
        connection, lambda: (streams(),),
        {"eps": sets("hc_eps", 0.1), "iterations": sets("hc_sinkhorn_iters", 1),
         "norm": sets("input_norm.eps", 0.5), **hooks("input_norm")},
    ),
    "rotary": (rotating.Rotating, rotating.tensors, {}),
}  # fmt: skip
CHANGES = [
    pytest.param(make, given, change, id=f"{kind}-{name}")
    for kind, (make, given, changes) in KINDS.items()
    for name, change in changes.items()
]


def outcome(module: nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    """The results of a call, and the gradients of its arguments and of all parameters."""
    torch.manual_seed(0)
    args = pytree.tree_map_only(Tensor, lambda x: x.detach().requires_grad_(), args)
    module.zero_grad()
    found = [y for y in pytree.tree_leaves(module(*args)) if isinstance(y, Tensor)]
    sum((y * torch.arange(1.0, 1 + y.numel()).view(y.shape).sin()).sum() for y in found).backward()
    given = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
    grads = [x.grad for x in (*given, *module.parameters()) if x.grad is not None]
    return [*(y.detach() for y in found), *grads]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.filterwarnings("ignore:liger_ops:UserWarning")
@pytest.mark.parametrize(("make", "given", "change"), CHANGES)
def test_a_change_after_fuse_has_its_effect(
    make: Callable[[], nn.Module], given: Callable[[], Any], change: Callable[[Any], None]
) -> None:
    """Results and gradients are those of an untouched module with the same change, also after a
    copy and a pickle."""
    torch.manual_seed(1)
    plain, args = make(), given()
    fused = copy.deepcopy(plain)
    assert fuse(fused)
    before = outcome(plain, args)
    torch.testing.assert_close(outcome(fused, args), before, rtol=1e-4, atol=1e-4)
    copies = [copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))]
    for module in (plain, fused, *copies):
        change(module)
    expected = outcome(plain, args)
    assert not same(expected, before)
    for module in (fused, *copies):
        torch.testing.assert_close(outcome(module, args), expected, rtol=1e-5, atol=1e-5)


def test_a_change_is_told_once() -> None:
    model = nn.ModuleList(MLP() for _ in range(2))
    fuse(model)
    x = torch.randn(2, HIDDEN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model[0](x)
    for module in model:
        module.drop[0].p = 0.5
    with pytest.warns(
        UserWarning, match=r"MLP runs its own code.*: drop\.0\.p was changed"
    ) as told:
        for module in (*model, *model):
            module(x)
    assert len(told) == 2


@pytest.mark.filterwarnings("ignore:liger_ops:UserWarning")
@pytest.mark.parametrize("name", ["dropout", "another-act", "config", "child", "act-forward"])
def test_compiled_code_notices_a_change(name: str) -> None:
    """One graph before and one after it: Dynamo guards on what `fuse` assumed."""
    torch._dynamo.reset()
    make, given, changes = KINDS["mlp"]
    plain, args = make().eval(), given()
    fused = copy.deepcopy(plain)
    fuse(fused)
    counter = CompileCounter()
    compiled = torch.compile(fused, backend=counter, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(*args), plain(*args))
    assert counter.frame_count == 1
    changes[name](plain)
    changes[name](fused)
    torch.testing.assert_close(compiled(*args), plain(*args))
    assert counter.frame_count == 2


def half_turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Rope whose pairs are made by another global function."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["rotate", "turned"])
def test_a_rotary_function_of_a_file_is_another_later(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotating.set_rotate(monkeypatch, half_turned)
    torch._dynamo.reset()
    module, args = rotating.Rotating(), rotating.tensors()
    fuse(module)
    assert rotating.ops_of(module, args) == ["rope"]
    called = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    torch.testing.assert_close(called(*args), half_turned(*args))
    if name == "rotate":
        rotating.set_rotate(monkeypatch, rotating.interleaved)
    else:
        monkeypatch.setitem(globals(), "turned", torch.neg)
    assert rotating.ops_of(module, args) == []
    torch.testing.assert_close(called(*args), rotating.rotate(*args), rtol=0, atol=0)


def test_an_attention_function_is_registered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The implementation that `fuse` calls, and masks for it, are those of the registries."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    plain = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    fused, x = copy.deepcopy(plain), LLAMA.inputs(torch.float32)
    assert "attention" in fuse(fused).counts()
    before = output(plain, x)
    sdpa, mask = functions["sdpa"], masks["sdpa"]

    def halved(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return sdpa(module, query / 2, *args, **kwargs)

    monkeypatch.setitem(type(functions)._global_mapping, "sdpa", halved)
    torch.testing.assert_close(output(fused, x), output(plain, x), rtol=1e-4, atol=1e-5)
    assert not torch.equal(output(plain, x), before)
    called: list[Any] = []
    monkeypatch.setitem(
        type(masks)._global_mapping, "sdpa", lambda *a, **k: called.append(1) or mask(*a, **k)
    )
    output(fused, x)
    assert called
