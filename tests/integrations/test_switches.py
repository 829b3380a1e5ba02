"""The plugin of Axolotl, the kernel of LLaMA-Factory and the losses of ms-swift.

Each test runs in the installed package or, where it cannot be imported, in a stand-in that has the
names and signatures which the integration uses.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from liger_ops.integrations import llamafactory, swift

AXOLOTL = "liger_ops.integrations.axolotl"
V = 37
IDS = torch.randint(V, (2, 7), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, dict[str, Any]]], None]:
    """Return a function that makes modules, unless they can be imported."""

    def make(modules: dict[str, dict[str, Any]]) -> None:
        try:
            for path in modules:
                importlib.import_module(path)
            return
        except ImportError:
            pass
        for path in modules:
            parts = path.split(".")
            for end in range(1, len(parts) + 1):
                name = ".".join(parts[:end])
                if name not in sys.modules:
                    module = ModuleType(name)
                    module.__path__ = []
                    monkeypatch.setitem(sys.modules, name, module)
            vars(sys.modules[path]).update(modules[path])

    return make


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=V,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def step(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    value = loss(model)
    trained = [one for one in model.parameters() if one.requires_grad]
    return [value.detach(), *torch.autograd.grad(value, trained)]


def ops_of(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> set[str]:
    with torch.profiler.profile() as profile:
        step(model, loss)
    names = {event.key for event in profile.key_averages()}
    return {name.removeprefix("liger::") for name in names if name.startswith("liger::")}


class AxolotlPlugin:
    """The hooks of Axolotl's `BasePlugin`, which a plugin inherits."""

    def post_model_load(self, cfg, model):
        raise NotImplementedError


def load_plugin(plugin_name: str) -> Any:
    module, _, name = plugin_name.rpartition(".")
    return getattr(importlib.import_module(module), name)()


@pytest.fixture
def axolotl(stand_in: Any) -> Iterator[Any]:
    stand_in(
        {"axolotl.integrations.base": {"BasePlugin": AxolotlPlugin, "load_plugin": load_plugin}}
    )
    sys.modules.pop(AXOLOTL, None)
    yield importlib.import_module("axolotl.integrations.base")
    sys.modules.pop(AXOLOTL, None)


@pytest.mark.parametrize("adapter", [None, "lora"])
def test_axolotl(axolotl, adapter):
    plugin = axolotl.load_plugin(f"{AXOLOTL}.LigerOpsPlugin")
    assert isinstance(plugin, axolotl.BasePlugin)
    model: Any = tiny()
    if adapter:
        lora = LoraConfig(target_modules=["q_proj", "up_proj"], r=4, init_lora_weights=False)
        model = get_peft_model(model, lora)
    loss = lambda model: model(**BATCH).loss
    theirs = step(model, loss)
    plugin.post_model_load(SimpleNamespace(adapter=adapter), model)
    torch.testing.assert_close(step(model, loss), theirs)
    expected = {"rms_norm", "swiglu", "rope", "linear_cross_entropy"}
    found = ops_of(model, loss)
    assert expected <= found and ("lora_linear" in found) == (adapter == "lora")


def test_without_axolotl(monkeypatch):
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", None)
    monkeypatch.delitem(sys.modules, AXOLOTL, raising=False)
    with pytest.raises(ImportError, match="needs axolotl"):
        importlib.import_module(AXOLOTL)


class DeviceType(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class BaseKernel:
    _kernel_id: Any = ""
    _device = [DeviceType.CPU]

    @classmethod
    def get_kernel_id(cls):
        return cls._kernel_id

    @classmethod
    def get_device(cls):
        return cls._device

    @classmethod
    def apply(cls, **kwargs):
        raise NotImplementedError


class Registry:
    _kernels: dict[str, Any] = {}

    @classmethod
    def register(cls, kernel_cls):
        assert issubclass(kernel_cls, BaseKernel) and DeviceType.CPU in kernel_cls.get_device()
        assert kernel_cls.get_kernel_id() not in cls._kernels
        cls._kernels[kernel_cls.get_kernel_id()] = kernel_cls
        return kernel_cls

    @classmethod
    def get(cls, kernel_id):
        return cls._kernels.get(kernel_id)

    @classmethod
    def get_registered_kernels(cls):
        return cls._kernels


def apply_default_kernels(model, include_kernels=None):
    for kernel in include_kernels.split(","):
        if kernel not in Registry._kernels:
            raise ValueError(f"Kernel {kernel} not found")
        Registry._kernels[kernel].apply(model=model)
    return model


def test_llamafactory(stand_in):
    kernels = llamafactory.KERNELS
    stand_in(
        {
            f"{kernels}.registry": {"Registry": Registry, "register_kernel": Registry.register},
            f"{kernels}.base": {"BaseKernel": BaseKernel},
            f"{kernels}.interface": {"apply_default_kernels": apply_default_kernels},
            "llamafactory.v1.accelerator.helper": {"DeviceType": DeviceType},
        }
    )
    apply = importlib.import_module(f"{kernels}.interface").apply_default_kernels

    def loss(model: nn.Module) -> Tensor:
        """As the trainers of v1, which do not call the model's own loss."""
        logits = model(input_ids=IDS).logits.float()[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten())

    model = tiny()
    theirs = step(model, loss)
    llamafactory.install()
    llamafactory.install()
    try:
        assert apply(model, "liger_ops") is model
    finally:
        llamafactory.uninstall()
    torch.testing.assert_close(step(model, loss), theirs)
    assert {"rms_norm", "swiglu", "rope"} <= ops_of(model, loss)
    with pytest.raises(ValueError, match="liger_ops not found"):
        apply(model, "liger_ops")


def test_without_llamafactory(monkeypatch):
    monkeypatch.setitem(sys.modules, f"{llamafactory.KERNELS}.registry", None)
    with pytest.raises(ImportError, match="llamafactory"):
        llamafactory.install()


class LigersGRPO:
    """Liger-Kernel's `LigerFusedLinearGRPOLoss`, of the formula, as ms-swift calls it."""

    def __init__(
        self, beta=0.04, compiled=True, use_ref_model=True, chunk_size=1, epsilon_low=0.2,
        epsilon_high=0.2, loss_type="dapo", max_completion_length=None,
        importance_sampling_level="token", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
        temperature=1.0, delta=None, use_bias_correction_kl=False,
    ):  # fmt: skip
        self.beta, self.low, self.high = beta, epsilon_low, epsilon_high
        self.loss_type, self.temperature = loss_type, temperature
        self.level = importance_sampling_level

    def __call__(
        self, _input, lin_weight, selected_token_ids, attention_mask, advantages, bias=None,
        ref_per_token_logps=None, old_per_token_logps=None, ref_input=None, ref_weight=None,
        ref_bias=None, vllm_is_ratio=None, num_items_in_batch=None,
    ):  # fmt: skip
        mask = attention_mask.float()
        logits = F.linear(_input, lin_weight, bias) / self.temperature
        log_p = logits.log_softmax(-1).gather(-1, selected_token_ids.unsqueeze(-1)).squeeze(-1)
        log_ratio = log_p - old_per_token_logps
        if self.level == "sequence":
            log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1)).unsqueeze(-1)
        ratio, A = log_ratio.exp(), advantages.unsqueeze(-1)
        clipped = ratio.clamp(1 - self.low, 1 + self.high)
        term = -torch.min(ratio * A, clipped * A) * vllm_is_ratio
        outside = ((ratio < 1 - self.low) & (A < 0)) | ((ratio > 1 + self.high) & (A > 0))
        metrics = [(outside * mask).sum() / mask.sum()]
        if self.beta:
            gap = ref_per_token_logps - log_p
            kl = gap.exp() - gap - 1
            term = term + self.beta * kl
            metrics.insert(0, (kl.detach() * mask).sum() / mask.sum())
        rows = (term * mask).sum(-1)
        loss = (rows / mask.sum(-1)).mean() if self.loss_type == "grpo" else rows.sum() / mask.sum()
        return loss, tuple(metrics)


class LigersJSD:
    """Liger-Kernel's `LigerFusedLinearJSDLoss`, of the formula, as ms-swift calls it."""

    def __init__(
        self, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100,
        temperature=1.0, compiled=True, chunk_size=1024, return_soft_hard_loss=False,
    ):  # fmt: skip
        assert (weight_hard_loss, weight_soft_loss) == (0.0, 1.0)
        self.beta, self.ignored, self.temperature = beta, ignore_index, temperature

    def __call__(
        self, student_input, student_weight, teacher_input, teacher_weight, true_labels,
        student_bias=None, teacher_bias=None,
    ):  # fmt: skip
        student = F.linear(student_input, student_weight, student_bias)
        teacher = F.linear(teacher_input, teacher_weight, teacher_bias)
        p, q = ((one / self.temperature).softmax(-1) for one in (student, teacher))
        mixed = (self.beta * q + (1 - self.beta) * p).log()
        each = self.beta * (q * (q.log() - mixed)).sum(-1)
        each = each + (1 - self.beta) * (p * (p.log() - mixed)).sum(-1)
        kept = true_labels != self.ignored
        return (each * kept).sum() / kept.sum()


@pytest.fixture
def losses(stand_in: Any) -> Iterator[dict[str, Any]]:
    """Call each trainer's way to the class of its loss, by trainer."""
    stand_in({"liger_kernel.chunked_loss": {swift.GRPO[1]: LigersGRPO}})
    stand_in({"swift.rlhf_trainers.gkd_trainer": {swift.GKD[1]: LigersJSD}})

    def of(path: str, name: str) -> Any:
        return getattr(importlib.import_module(path), name)

    yield {"grpo": lambda: of(*swift.GRPO), "gkd": lambda: of(*swift.GKD)}
    swift.uninstall()


def values(call: Callable[[Tensor, Tensor], Any], *inputs: Tensor) -> list[Tensor]:
    inputs = tuple(one.detach().clone().requires_grad_() for one in inputs)
    found = call(*inputs)
    loss, metrics = found if isinstance(found, tuple) else (found, ())
    return [loss, *metrics, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_grpo_of_swift(losses, loss_type, level, beta):
    B, T, D = 3, 5, 8
    torch.manual_seed(0)
    x, weight, bias = torch.randn(B, T, D), torch.randn(V, D), torch.randn(V)
    ids, mask = torch.randint(V, (B, T)), torch.rand(B, T) > 0.3
    mask[:, 0] = True
    log_p = F.linear(x, weight, bias).div(0.9).log_softmax(-1)
    log_p = log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    old, reference = (log_p + 0.3 * torch.randn(B, T) for _ in range(2))
    call = {
        "selected_token_ids": ids, "attention_mask": mask.long(), "advantages": torch.randn(B),
        "old_per_token_logps": old, "ref_per_token_logps": reference if beta else None,
        "vllm_is_ratio": torch.rand(B, T) + 0.5, "bias": bias,
    }  # fmt: skip

    def computed() -> list[Tensor]:
        loss = losses["grpo"]()(
            beta=beta, compiled=False, epsilon_low=0.2, epsilon_high=0.28, temperature=0.9,
            use_ref_model=beta != 0.0, loss_type=loss_type, max_completion_length=T,
            importance_sampling_level=level, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
        )  # fmt: skip
        return values(lambda x, w: loss(_input=x, lin_weight=w, **call), x, weight)

    theirs = computed()
    swift.install()
    assert losses["grpo"]() is swift.GRPOLoss
    torch.testing.assert_close(computed(), theirs)


@pytest.mark.parametrize(("loss_type", "clipped"), [("cispo", 1.0), ("sapo", 0.0)])
def test_a_loss_without_both_clip_ratios(loss_type, clipped):
    """The ratio is 1, which is above cispo's epsilon_high; sapo does not clip."""
    loss = swift.GRPOLoss(beta=0.0, loss_type=loss_type)
    ids = torch.zeros(1, 2, dtype=torch.int64)
    call = {"attention_mask": torch.ones(1, 2), "advantages": torch.ones(1)}
    _, metrics = loss(torch.randn(1, 2, 4), torch.randn(V, 4), ids, **call)
    assert [float(one) for one in metrics] == [clipped]


def test_another_equation_is_refused():
    with pytest.raises(ValueError, match="luspo"):
        swift.GRPOLoss(loss_type="luspo")


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_gkd_of_swift(losses, temperature):
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, 8)
    x, weight, taught, teacher = draw(2, 4), draw(V), draw(2, 4), draw(V)
    labels = torch.randint(V, (2, 4))
    labels[0, :2] = -100

    def computed() -> list[Tensor]:
        loss = losses["gkd"]()(
            weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.3, ignore_index=-100,
            temperature=temperature, compiled=False,
        )  # fmt: skip
        return values(
            lambda x, w: loss(
                student_input=x, student_weight=w, teacher_input=taught, teacher_weight=teacher,
                true_labels=labels, student_bias=None, teacher_bias=None,
            ),
            x, weight,
        )  # fmt: skip

    theirs = computed()
    swift.install()
    assert losses["gkd"]() is swift.JSDLoss
    torch.testing.assert_close(computed(), theirs)


def test_swift_is_restored(losses, monkeypatch):
    own = [losses[name]() for name in ("grpo", "gkd")]
    swift.install()
    swift.install()
    swift.uninstall()
    assert [losses[name]() for name in ("grpo", "gkd")] == own
    monkeypatch.delattr(sys.modules[swift.GKD[0]], swift.GKD[1])
    with pytest.raises(RuntimeError, match="must have LigerFusedLinearJSDLoss"):
        swift.install()
    assert losses["grpo"]() is own[0]
