"""Runs of a model, compiled with the `liger` backend and without, and what their graphs hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.overrides import TorchFunctionMode

import liger_ops

ATTENTION = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)

Loss = Callable[..., Tensor]


class Inner:
    """An inner backend that runs a graph by way of AOT autograd, and counts what it is given."""

    def __init__(self) -> None:
        self.counts: list[Counter[str]] = []

    def __call__(self, module: fx.GraphModule, inputs: Any) -> Any:
        self.counts.append(places_in(module))
        return aot_eager(module, inputs)


def places_in(module: fx.GraphModule) -> Counter[str]:
    """How often each op stands in a graph and those below it, by the names of `Finding.op`."""
    counts: Counter[str] = Counter()
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if str(node.target).startswith("liger."):
                counts[str(node.target).split(".")[1]] += 1
            elif node.target in ATTENTION:
                counts["causal_attention"] += bool(node.kwargs.get("is_causal"))
                counts["grouped_attention"] += bool(node.kwargs.get("enable_gqa"))
    return +counts


class InFloat64(TorchFunctionMode):
    """float64 wherever the model's code asks for float32, as around norms and losses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = Tensor.double if func is Tensor.float else func
        return func(
            *map(widen, args), **{key: widen(value) for key, value in (kwargs or {}).items()}
        )


def loss_of(model: nn.Module) -> Loss:
    """The common step: the logits go nowhere but into the loss."""
    return lambda **batch: model(**batch).loss


def results(model: nn.Module, loss: Loss, batch: dict[str, Any]) -> dict[str, Tensor]:
    """The loss, and the gradient of every parameter that has one."""
    model.zero_grad()
    value = loss(**batch)
    value.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "loss": value.detach(),
        **{name: grad for name, grad in grads.items() if grad is not None},
    }


def compiled(loss: Any, backend: str, **options: Any) -> tuple[Any, Inner]:
    """`loss` compiled whole, by the `liger` backend or "none", and what its graphs will hold."""
    torch._dynamo.reset()
    inner = Inner()
    if backend == "none":
        return torch.compile(loss, backend=inner, fullgraph=True, **options), inner
    assert backend == "liger"
    backend_options = {"inner_backend": inner}
    return torch.compile(
        loss, backend=liger_ops.backend, options=backend_options, fullgraph=True, **options
    ), inner


def true_results(model: nn.Module, loss: Loss, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Those of the model as it stands, which is of float64, run eagerly."""
    # The products of experts have no float64 but in this form.
    model.set_experts_implementation("batched_mm")
    with InFloat64():
        return results(model, loss, batch)


def roundings(dtype: torch.dtype) -> float:
    """One to `dtype`, and what sums in another order may differ by in the float32 inside."""
    return torch.finfo(dtype).eps + 8 * torch.finfo(torch.float32).eps


def assert_as_near_to_truth(
    after: dict[str, Tensor],
    before: dict[str, Tensor],
    truth: dict[str, Tensor],
    allowance: float,
) -> None:
    """What the rewritten model gives is as near to float64 as what the untouched one gives.

    An op rounds where the code that it replaces rounds, or less often, and sums in another order.
    So its error is held to twice the untouched model's and an allowance for roundings; each as a
    norm over the tensor. A gradient that is zero but for rounding, such as that of a key's bias, is
    measured against a thousandth of the gradient of the whole model.
    """
    assert after.keys() == before.keys() == truth.keys()
    whole = torch.stack([value.norm() for name, value in truth.items() if name != "loss"]).norm()
    for name, true in truth.items():
        assert after[name].dtype is before[name].dtype, name
        scale = max(true.norm(), 1e-3 * whole)
        error_after, error_before = (
            ((found[name].double() - true).norm() / scale).item() for found in (after, before)
        )
        bound = 2 * error_before + allowance
        assert error_after <= bound, (
            f"{name}: {error_after:.2e} from truth after, {error_before:.2e} before"
        )
