"""The ops behind Megatron-Core's norms and functions: in a stand-in, and where it is installed."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from liger_ops.integrations import megatron as integration

S, B, V, N = 5, 2, 12, 8
LATER = "megatron.core.imported_later"


class WrappedTorchNorm:
    """Megatron's class of this name, without its refusals."""

    def __new__(
        cls, config, hidden_size, eps=1e-5, persist_layer_norm=False, zero_centered_gamma=False,
        normalization="LayerNorm",
    ):  # fmt: skip
        return getattr(nn, config.normalization)(hidden_size, eps=eps)


class FusedLayerNorm(WrappedTorchNorm):
    """In the place of Apex's."""


class TENorm(WrappedTorchNorm):
    """In the place of Transformer Engine's."""


def vocab_parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing=0.0):
    assert label_smoothing > 0, "without smoothing, the op serves"
    return torch.full(target.shape, label_smoothing)


def fused_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group):
    raise AssertionError("the op serves")


def bias_swiglu_impl(input, bias, fp8_input_store=False, cpu_offload_input=False, clamp_value=None):
    return fp8_input_store, cpu_offload_input, clamp_value


# The modules that define the names, and modules that import them, as Megatron lays them out. A
# later version imports the fused loss under another name.
MODULES: dict[str, dict[str, Any]] = {
    "": {},
    ".core": {},
    ".core.parallel_state": {"get_tensor_model_parallel_group": lambda: dist.group.WORLD},
    ".core.tensor_parallel.cross_entropy": {
        "vocab_parallel_cross_entropy": vocab_parallel_cross_entropy
    },
    ".core.tensor_parallel": {"vocab_parallel_cross_entropy": vocab_parallel_cross_entropy},
    ".core.fusions": {},
    ".core.fusions.fused_cross_entropy": {
        "fused_vocab_parallel_cross_entropy": fused_vocab_parallel_cross_entropy
    },
    ".core.fusions.fused_layer_norm": {"FusedLayerNorm": FusedLayerNorm},
    ".core.fusions.fused_bias_swiglu": {"bias_swiglu_impl": bias_swiglu_impl},
    ".core.models": {},
    ".core.models.backends": {
        "_fused_ce": fused_vocab_parallel_cross_entropy, "LNImpl": FusedLayerNorm,
        "WrappedTorchNorm": WrappedTorchNorm,
    },
    ".core.transformer": {},
    ".core.transformer.torch_norm": {"WrappedTorchNorm": WrappedTorchNorm},
    ".core.transformer.transformer_block": {
        "LayerNormImpl": WrappedTorchNorm, "WrappedTorchNorm": WrappedTorchNorm,
    },
    ".core.transformer.mlp": {"bias_swiglu_impl": bias_swiglu_impl},
}  # fmt: skip


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    for name in [name for name in sys.modules if f"{name}.".startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, name)
    made = {}
    for name, contents in MODULES.items():
        module = ModuleType(f"megatron{name}")
        module.__path__ = []
        vars(module).update(contents)
        made[name] = module
        monkeypatch.setitem(sys.modules, f"megatron{name}", module)
    monkeypatch.setitem(sys.modules, LATER, ModuleType(LATER))
    yield made
    integration.uninstall()


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def contents(modules: dict[str, ModuleType]) -> dict[str, dict[str, Any]]:
    return {
        name: {key: getattr(module, key) for key in MODULES[name]}
        for name, module in modules.items()
    }


def config(normalization: str = "RMSNorm", **options: Any) -> SimpleNamespace:
    defaults = {"layernorm_zero_centered_gamma": False, "sequence_parallel": False}
    return SimpleNamespace(normalization=normalization, **defaults | options)


def results(function: Any, *inputs: Tensor) -> list[Tensor]:
    inputs = tuple(one.detach().clone().requires_grad_() for one in inputs)
    y = function(*inputs)
    return [y, *torch.autograd.grad(y.float().square().sum(), inputs)]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def targets() -> Tensor:
    return torch.randint(V, (S, B), generator=torch.Generator().manual_seed(0))


def test_every_name_is_replaced_and_restored(modules):
    integration.install()
    integration.install()
    changed = contents(modules)
    for name, held in MODULES.items():
        for key, original in held.items():
            same = changed[name][key] is original
            assert same == (key == "get_tensor_model_parallel_group"), (name, key)
    block = changed[".core.transformer.transformer_block"]
    assert block["LayerNormImpl"] is block["WrappedTorchNorm"]
    backends = changed[".core.models.backends"]
    assert backends["LNImpl"] is changed[".core.fusions.fused_layer_norm"]["FusedLayerNorm"]
    assert backends["LNImpl"] is not backends["WrappedTorchNorm"]
    sys.modules[LATER].loss = backends["_fused_ce"]  # type: ignore[attr-defined]

    integration.uninstall()
    assert contents(modules) == {name: dict(held) for name, held in MODULES.items()}
    assert sys.modules[LATER].loss is fused_vocab_parallel_cross_entropy


def test_the_last_norm_with_transformer_engine(modules):
    block = modules[".core.transformer.transformer_block"]
    block.LayerNormImpl = TENorm
    integration.install()
    assert block.LayerNormImpl is block.WrappedTorchNorm
    integration.uninstall()
    assert block.LayerNormImpl is TENorm


def test_only_what_is_asked_for(modules):
    integration.install(norms=False, swiglu=False)
    changed = contents(modules)
    kept = {
        key
        for held in changed.values()
        for key, value in held.items()
        if value is globals().get(key)
    }
    assert kept == {"WrappedTorchNorm", "FusedLayerNorm", "bias_swiglu_impl"}
    assert modules[".core.transformer.transformer_block"].LayerNormImpl is WrappedTorchNorm


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_norms(modules, normalization):
    integration.install()
    made = modules[".core.transformer.transformer_block"].LayerNormImpl(
        config=config(normalization), hidden_size=N, eps=1e-4
    )
    own = WrappedTorchNorm(config(normalization), N, 1e-4)
    names = list(own.state_dict())
    assert list(made.state_dict()) == names
    inputs = [draw(S, B, N), *(draw(N + index)[:N] for index in range(len(names)))]

    def call(norm: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        named = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(norm, named, (x,))

    pairs = [results(functools.partial(call, norm), *inputs) for norm in (made, own)]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)
    halves = [one.bfloat16() for one in inputs]
    torch.testing.assert_close(call(made, *halves), call(own, *halves))


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_centred_weights_and_sequence_parallelism(modules, normalization):
    integration.install()
    options = config(normalization, layernorm_zero_centered_gamma=True, sequence_parallel=True)
    made = modules[".core.models.backends"].LNImpl(options, N)
    assert all(parameter.sequence_parallel for parameter in made.parameters())
    assert not made.weight.any()
    own = WrappedTorchNorm(options, N)
    x, weight = draw(S, B, N), draw(N)
    ours = results(lambda x, w: torch.func.functional_call(made, {"weight": w}, (x,)), x, weight)
    theirs = results(
        lambda x, w: torch.func.functional_call(own, {"weight": 1 + w}, (x,)), x, weight
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_another_normalization_is_megatrons(modules):
    integration.install()
    norm = modules[".core.transformer.torch_norm"].WrappedTorchNorm
    assert type(norm(config=config("Identity"), hidden_size=N)) is nn.Identity


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss(modules, group, fused, dtype):
    integration.install()
    if fused:
        function = functools.partial(modules[".core.models.backends"]._fused_ce, tp_group=group)
    else:
        function = modules[".core.tensor_parallel"].vocab_parallel_cross_entropy
    target, logits = targets(), draw(S, B, V).to(dtype)
    before = logits.clone()
    ours = results(lambda x: function(vocab_parallel_logits=x, target=target), logits)
    theirs = results(
        lambda x: F.cross_entropy(x.float().flatten(0, 1), target.flatten(), reduction="none"),
        logits,
    )
    assert ours[0].shape == (S, B) and ours[0].dtype == torch.float32
    torch.testing.assert_close(ours[0].flatten(), theirs[0])
    torch.testing.assert_close(ours[1], theirs[1])
    assert torch.equal(logits, before)


def test_a_target_that_is_no_word(modules, group):
    """Megatron's users mask such tokens afterwards: a NaN or an error would remain."""
    integration.install()
    target = targets()
    target[0, 0], target[1, 1] = -1, V
    loss, gradient = results(
        lambda x: modules[".core.models.backends"]._fused_ce(x, target, group), draw(S, B, V)
    )
    assert loss[0, 0] == loss[1, 1] == 0 and not gradient[0, 0].any() and not gradient[1, 1].any()
    assert (loss == 0).sum() == 2


def test_label_smoothing_is_megatrons(modules, group):
    integration.install()
    loss = modules[".core.tensor_parallel"].vocab_parallel_cross_entropy
    assert torch.equal(loss(draw(S, B, V), targets(), 0.25), torch.full((S, B), 0.25))


@pytest.mark.parametrize("biased", [True, False])
def test_swiglu(modules, biased):
    integration.install()
    function = modules[".core.transformer.mlp"].bias_swiglu_impl
    x, bias = draw(S, B, 2 * N), draw(2 * N)

    def expected(x: Tensor, bias: Tensor) -> Tensor:
        gate, up = (x + bias if biased else x + 0 * bias).chunk(2, -1)
        return F.silu(gate) * up

    ours = results(
        lambda x, b: function(x, b if biased else None, False, False) + 0 * b[:N], x, bias
    )
    for one, other in zip(ours, results(expected, x, bias), strict=True):
        torch.testing.assert_close(one, other)
    assert function(x, None, True, False) == (True, False, None)
    assert function(x, None, cpu_offload_input=True) == (False, True, None)
    assert function(x, None, clamp_value=7.0) == (False, False, 7.0)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (".core.fusions.fused_bias_swiglu", "bias_swiglu_impl"),
        (".core.transformer.transformer_block", "LayerNormImpl"),
    ],
)
def test_another_version_is_left(modules, module, name, monkeypatch):
    monkeypatch.delattr(modules[module], name)
    with pytest.raises(RuntimeError, match=rf"megatron{module}\.{name} must exist"):
        integration.install()
    loss = modules[".core.models.backends"]._fused_ce
    assert loss is fused_vocab_parallel_cross_entropy


def test_without_megatron(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ImportError, match="megatron"):
        integration.install()


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: it is not among the requirements of the tests",
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_of_megatron(count: int, tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "support/megatron_cpu.py"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(count), script, tmp_path / "results.json"),
        ],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results) == 5 + count
    for name, found in results.items():
        assert found["loss"] < 1e-6 and found["gradients"] < 1e-6, (name, found)
        assert found["same bits again"] and found["restored"], (name, found)
        norm = name.split()[-1] if name.endswith("_norm") else "rms_norm"
        called = {f"{op}_backward" for op in (norm, "swiglu", "cross_entropy")}
        assert called <= found["ops"].keys(), (name, found)
