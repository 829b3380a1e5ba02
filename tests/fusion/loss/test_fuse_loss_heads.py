"""The head of a model with fused loss: tied, frozen, resized, and replaced after fuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from causal_models import (
    LLAMA,
    assert_same_gradients,
    assert_same_output,
    assert_trains_alike,
    batch,
    gradients,
    pair,
    with_fused_loss,
)
from fused_families import VOCABULARY, text
from liger_ops.fusion import fuse, loss


def test_tied_weights_stay_tied() -> None:
    model, fused = pair(text("Llama", 5, tie_word_embeddings=True))
    assert fused.lm_head.weight is fused.model.embed_tokens.weight
    assert_trains_alike(fused, model, **batch())


def test_bias_of_the_head() -> None:
    model = LLAMA.model()
    model.lm_head = nn.Linear(32, VOCABULARY)
    output = assert_trains_alike(with_fused_loss(model), model, **batch())
    assert output.loss.isfinite()


@pytest.mark.parametrize("trained", ["lm_head", "model", "lm_head.bias"])
def test_frozen_weights(trained: str) -> None:
    model = LLAMA.model()
    model.lm_head = nn.Linear(32, VOCABULARY)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    fused = with_fused_loss(model)
    assert_trains_alike(fused, model, **batch())
    names = {name for name, p in fused.named_parameters() if p.grad is not None}
    assert names == {name for name, _ in model.named_parameters() if name.startswith(trained)}


def test_parameters_and_state_dict_are_the_same() -> None:
    model = LLAMA.model()
    parameters, state = dict(model.named_parameters()), model.state_dict()
    fuse(model)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == list(state)
    assert isinstance(model.lm_head, nn.Linear)
    assert model.get_output_embeddings() is model.lm_head


def test_resized_vocabulary() -> None:
    model, fused = pair()
    for one in (model, fused):
        one.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
    fused.load_state_dict(model.state_dict())
    assert_trains_alike(fused, model, **batch())


class LoraHead(nn.Module):
    """A linear layer as peft wraps it: the layer inside, its attributes outside."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.a = nn.Parameter(torch.linspace(-1, 1, 2 * 32).reshape(2, 32))
        self.b = nn.Parameter(torch.linspace(-1, 1, 2 * VOCABULARY).reshape(VOCABULARY, 2))

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + F.linear(F.linear(x, self.a), self.b)


class SavedHead(nn.Module):
    """A module as peft keeps it to train it whole: the original, and a copy that is called."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module)})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.modules_to_save["default"], name)

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_to_save["default"](x)


class QuantizedHead(nn.Linear):
    pass


class Strange(nn.Parameter):
    pass


def wrap(wrapper: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], None]:
    def change(model: Any) -> None:
        model.lm_head = wrapper(model.lm_head)

    return change


def quantized(head: nn.Module) -> nn.Module:
    head.__class__ = QuantizedHead
    return head


def hooked(head: nn.Module) -> nn.Module:
    head.register_forward_hook(lambda module, args, y: y * 2)
    return head


def with_own_forward(head: nn.Module) -> nn.Module:
    forward = head.forward
    head.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]
    return head


def with_strange_weight(head: Any) -> nn.Module:
    head.weight = Strange(head.weight.detach())
    return head


def compiled(head: nn.Module) -> nn.Module:
    head.compile(backend="eager")
    return head


CHANGED_HEADS = {
    "its head is a test_fuse_loss_heads.LoraHead, not a torch.nn.Linear": wrap(LoraHead),
    "its head is a test_fuse_loss_heads.SavedHead, not": wrap(SavedHead),
    "its head is a test_fuse_loss_heads.QuantizedHead, not": wrap(quantized),
    "its head has hooks": wrap(hooked),
    "its head has a forward of its own": wrap(with_own_forward),
    "its head holds a Strange, not a plain tensor": wrap(with_strange_weight),
    "its head is compiled by itself": wrap(compiled),
}
CHANGED_HEAD = pytest.mark.parametrize(
    ("reason", "change"), CHANGED_HEADS.items(), ids=[reason[12:30] for reason in CHANGED_HEADS]
)


@CHANGED_HEAD
def test_other_heads_are_left(reason: str, change: Callable[[nn.Module], None]) -> None:
    model, changed = LLAMA.model(), LLAMA.model()
    change(model), change(changed)
    report = loss.fuse(changed)
    assert not report
    assert [(entry.where, entry.class_name) for entry in report.left] == [("", "LlamaForCausalLM")]
    assert reason in report.left[0].reason
    assert_same_output(changed(**batch()), model(**batch()))


@CHANGED_HEAD
def test_heads_changed_after_fuse(reason: str, change: Callable[[nn.Module], None]) -> None:
    model, fused = pair()
    change(model), change(fused)
    assert_same_output(fused(**batch()), model(**batch()))


def test_adapted_body_with_a_plain_head() -> None:
    """peft's default: everything frozen except the adapters."""
    model, fused = pair()
    for one in (model, fused):
        one.requires_grad_(False)
        attention = one.model.layers[0].self_attn
        attention.o_proj = Adapter(attention.o_proj)
    assert_trains_alike(fused, model, **batch())


class Adapter(nn.Module):
    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, base_layer.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) * self.scale


def test_loss_replaced_after_fuse() -> None:
    model, fused = pair()

    def unshifted(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        return F.cross_entropy(logits.float().view(-1, vocab_size), labels.view(-1))

    model.loss_function = fused.loss_function = unshifted
    assert_trains_alike(fused, model, **batch())

    def penalised(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return unshifted(logits, *args, **kwargs) + 1e-2 * logits.square().mean()

    model.loss_function = fused.loss_function = penalised
    with pytest.warns(UserWarning, match="its forward applies square to its logits"):
        output, expected = fused(**batch()), model(**batch())
    assert torch.equal(output.logits, expected.logits)
    torch.testing.assert_close(output.loss, expected.loss)
    assert_same_gradients(gradients(fused, output.loss), gradients(model, expected.loss))
