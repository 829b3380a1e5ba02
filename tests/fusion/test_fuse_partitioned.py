"""A model whose parameters are empty but within their modules' calls, as ZeRO-3 of DeepSpeed makes
them: fuse finds what it finds in the whole model, and the loss is that of the untouched model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from causal_models import assert_same_gradients
from fused_families import FAMILIES
from liger_ops import fuse, unfuse
from liger_ops.rewrites.engine.pattern import Pattern

LLAMA = next(family for family in FAMILIES if family.name == "Llama")
DEEPSPEED = "deepspeed.runtime.zero.parameter_offload"


class Regathered(Function):
    """A module's output: its parameters are whole in the backward, too."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gather: Callable[[], None]) -> Tensor:
        ctx.gather = gather
        return y.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.gather()
        return dy, None


class Partitioned:
    """Empties the parameters of a model, and registers the hooks that gather them. `calls` has the
    modules with parameters that were called."""

    def __init__(self, model: nn.Module) -> None:
        self.whole = {parameter: parameter.data for parameter in model.parameters()}
        self.calls: list[nn.Module] = []
        for parameter, data in self.whole.items():
            parameter.ds_shape = data.shape
            parameter.data = data.new_empty(0)

    def add_hooks(self, model: nn.Module) -> None:
        for module in model.modules():
            self._add_hooks(module)

    def _add_hooks(self, module: nn.Module) -> None:
        own = list(module.parameters(recurse=False))

        def gather() -> None:
            for parameter in own:
                parameter.data = self.whole[parameter]

        def before(module: nn.Module, args: Any) -> None:
            self.calls.append(module)
            gather()

        def after(module: nn.Module, args: Any, y: Any) -> Any:
            for parameter in own:
                parameter.data = parameter.data.new_empty(0)
            return Regathered.apply(y, gather) if own and isinstance(y, Tensor) else y

        before.__module__ = after.__module__ = DEEPSPEED
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)


def batch() -> dict[str, Tensor]:
    ids = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.masked_fill(ids < 9, -100)}


def trained(model: Any) -> tuple[Any, dict[str, Tensor]]:
    output = model(**batch())
    output.loss.backward()
    return output, {name: one.grad for name, one in model.named_parameters()}


@pytest.mark.parametrize("hooks_first", [False, True])
def test_a_model_in_parts_is_fused(hooks_first: bool) -> None:
    model = LLAMA.model()
    found = fuse(copy.deepcopy(model)).counts()
    expected, grads = trained(copy.deepcopy(model))
    partitioned = Partitioned(model)
    if hooks_first:
        partitioned.add_hooks(model)
    assert fuse(model).counts() == found
    if not hooks_first:
        partitioned.add_hooks(model)
    with warnings.catch_warnings(action="error", category=UserWarning):
        output, fused_grads = trained(model)
    assert output.logits is None
    # The loss runs the hooks of the head, and every norm its own.
    norms = sum("norm" in type(module).__name__.lower() for module in partitioned.calls)
    assert model.lm_head in partitioned.calls and norms == found["rms_norm"]
    torch.testing.assert_close(output.loss, expected.loss)
    assert_same_gradients(fused_grads, grads, 1e-5)


def test_norms_in_parts_stay_in_place() -> None:
    model = LLAMA.model()
    Partitioned(model)
    before = [id(module) for module in model.modules()]
    fuse(model)
    assert [id(module) for module in model.modules()] == before
    assert unfuse(model)


def test_a_linear_of_another_package_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """zero.Init sets one that cannot be traced in the place of PyTorch's."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x @ weight.t() if x.dim() == 2 and bias is None else x @ weight.t() + 0

    model = LLAMA.model()
    found = fuse(copy.deepcopy(model)).counts()
    monkeypatch.setattr(F, "linear", linear)
    Pattern(lambda x, weight: F.linear(x, weight).relu(), x=(2, 3), weight=(4, 3))
    assert fuse(model).counts() == found
    assert F.linear is linear
