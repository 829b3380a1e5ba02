"""Run a model with and without the `liger` backend, and count the ops in its graphs."""

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
from attention_graphs import as_it_is
from liger_ops.rewrites.engine.report import source_line

ATTENTION = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)

Loss = Callable[..., Tensor]


class Inner:
    """An inner backend that counts the ops in a graph and runs it, with AOT autograd by default."""

    def __init__(self, run: Callable[..., Any] = aot_eager) -> None:
        self.run = run
        self.counts: list[Counter[str]] = []
        self.before: list[Counter[str]] = []

    def __call__(self, module: fx.GraphModule, inputs: Any) -> Any:
        self.counts.append(places_in(module))
        return self.run(module, inputs)


def places_in(module: fx.GraphModule) -> Counter[str]:
    """Count each op in a graph and its subgraphs, by the names of `Finding.op`."""
    counts: Counter[str] = Counter()
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if str(node.target).startswith("liger."):
                counts[str(node.target).split(".")[1].removesuffix("_forward")] += 1
            elif node.target in ATTENTION:
                # The source line of a model's own call names the function.
                counts["attention"] += "scaled_dot_product_attention" not in source_line(node)
                counts["causal_attention"] += bool(node.kwargs.get("is_causal"))
                counts["grouped_attention"] += bool(node.kwargs.get("enable_gqa"))
    return +counts


class InFloat64(TorchFunctionMode):
    """Replaces float32 by float64 where the model's code asks for it, as in norms and losses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = Tensor.double if func is Tensor.float else func
        return func(
            *map(widen, args), **{key: widen(value) for key, value in (kwargs or {}).items()}
        )


def loss_of(model: nn.Module) -> Loss:
    """Return the usual step, in which the logits are used only for the loss."""
    return lambda **batch: model(**batch).loss


def results(model: nn.Module, loss: Loss, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Return the loss, and the gradient of every parameter that requires one."""
    model.zero_grad()
    value = loss(**batch)
    value.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "loss": value.detach(),
        **{name: grad for name, grad in grads.items() if grad is not None},
    }


def compiled(
    loss: Any, backend: str, run: Callable[..., Any] = as_it_is, **options: Any
) -> tuple[Any, Inner]:
    """Compile `loss` with fullgraph and the `liger` backend, which counts its ops before and after
    the rewrites. For the backend "none", return `loss` itself."""
    torch._dynamo.reset()
    inner = Inner(run)
    if backend == "none":
        return loss, inner

    def counting(module: fx.GraphModule, inputs: Any, **how: Any) -> Any:
        inner.before.append(places_in(module))
        return liger_ops.backend(module, inputs, **how)

    options["options"] = {"inner_backend": inner}
    return torch.compile(loss, backend=counting, fullgraph=True, **options), inner


def true_results(model: nn.Module, loss: Loss, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Return the results of a model in float64, run eagerly."""
    # Only this implementation of the experts' products supports float64.
    model.set_experts_implementation("batched_mm")
    with InFloat64():
        return results(model, loss, batch)


def roundings(dtype: torch.dtype) -> float:
    """Return one rounding to `dtype`, plus the effect of another summation order in float32."""
    return torch.finfo(dtype).eps + 8 * torch.finfo(torch.float32).eps


def assert_as_near_to_truth(
    after: dict[str, Tensor], before: dict[str, Tensor], truth: dict[str, Tensor], allowance: float
) -> None:
    """Check that the rewritten model is as close to float64 as the untouched model.

    An op rounds where the code that it replaces rounds, or less often, and sums in another order.
    Its error may be at most twice the untouched model's plus an allowance for rounding, each as a
    norm over the tensor. A gradient that is zero up to rounding, such as that of a key's bias, is
    measured relative to a thousandth of the whole model's gradient. The gradients of a weight and
    of its bias are measured together: that of the bias of GPT-OSS's router, which chooses between
    two experts, is one sum of numbers that cancel.
    """
    assert after.keys() == before.keys() == truth.keys()
    whole = torch.stack([value.norm() for name, value in truth.items() if name != "loss"]).norm()
    together: dict[str, list[str]] = {}
    for name in truth:
        assert after[name].dtype is before[name].dtype, name
        together.setdefault(name.removesuffix(".bias").removesuffix(".weight"), []).append(name)
    for name, members in together.items():
        after_, before_, true = (
            torch.cat([tensors[member].double().flatten() for member in members])
            for tensors in (after, before, truth)
        )
        scale = max(true.norm(), 1e-3 * whole)
        error_after, error_before = (
            ((one - true).norm() / scale).item() for one in (after_, before_)
        )
        bound = 2 * error_before + allowance
        assert error_after <= bound, (
            f"{name}: {error_after:.2e} from truth after, {error_before:.2e} before"
        )
