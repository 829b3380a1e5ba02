"""Training steps on several ranks, compared with the same steps in one process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import ranks
from causal_models import assert_same_gradients
from fused_families import FAMILIES, VOCABULARY, Family

# 61 words: no number of ranks divides the rows of the embedding and of the head evenly.
LLAMA, GEMMA, MIXTURE = TRAINED = [
    next(family for family in FAMILIES if family.name == name)
    for name in ("Llama", "Gemma3", "Qwen3Moe")
]
STEPS, ROWS, LENGTH = 3, 2, 8
BOUND = 1e-5
# The names under which wrappers such as DDP hold a module.
WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module")

# Loss and gradients of each step.
Run = list[tuple[Tensor, dict[str, Tensor]]]
Loss = Callable[..., Tensor]


def made(family: Family = LLAMA, attention: str = "sdpa") -> Any:
    model: Any = family.model()
    model.set_attn_implementation(attention)
    return model


def named(name: str) -> Family:
    return next(family for family in TRAINED if family.name == name)


def batch(step: int, count: int) -> dict[str, Tensor]:
    """Draw the rows of `count` ranks. The first rank ignores some tokens, and in step 1 all."""
    generator = torch.Generator().manual_seed(step)
    shape = (2, ROWS * count, LENGTH)
    drawn = torch.randint(1, VOCABULARY, shape, generator=generator, device="cpu")
    ids, labels = drawn.to(ranks.DEVICE)
    labels[0, :4] = -100
    if step == 1:
        labels[:ROWS] = -100
    return {"input_ids": ids, "labels": labels}


def items(whole: dict[str, Tensor]) -> Tensor:
    """Count the tokens with a loss: the first token of a row is no label."""
    return (whole["labels"][:, 1:] != -100).sum()


def shard(model: Any, **options: Any) -> Any:
    """Shard each layer, and the rest of the model with the model itself."""
    options.setdefault("mesh", ranks.mesh())
    for module in (*model.model.layers, model):
        fully_shard(module, **options)
    return model


def loss_of(model: Any) -> Loss:
    return lambda **inputs: model(**inputs).loss


def trained(
    model: nn.Module, loss_of_rows: Loss | None = None, parts: int = 1, group: Any = None
) -> Run:
    """Train on the rows of this rank, the loss divided by the number of tokens of all ranks.

    parts: the number of backwards of a step, each of some of the rows. FSDP2 reduces the gradients
        after the last one.
    group: the ranks that have different rows, None for all ranks.
    """
    count = dist.get_world_size(group) if model_is_distributed(model) else 1
    rank = dist.get_rank(group) if count > 1 else 0
    rows_of_a_rank = ROWS * dist.get_world_size() // count
    # On GPUs foreach is the default, which does not take DTensors beside plain parameters.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    compute, run = loss_of_rows or loss_of(model), []
    for step in range(STEPS):
        whole = batch(step, dist.get_world_size())
        total = torch.zeros(())
        for part in torch.arange(rows_of_a_rank).chunk(parts):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(bool(part[-1] == rows_of_a_rank - 1))
            rows = part + rank * rows_of_a_rank
            inputs = {name: value[rows] for name, value in whole.items()}
            # Times the number of ranks, because wrappers average their gradients.
            loss = compute(**inputs, num_items_in_batch=items(whole)) * count
            loss.backward()
            total += loss.detach() / count
        if count > 1:
            dist.all_reduce(total, group=group)
        with unsharded(model):
            grads = {plain_name(name): full(p.grad) for name, p in model.named_parameters()}
        run.append((total, grads))
        optimizer.step()
        optimizer.zero_grad()
    return run


@functools.cache
def expected(name: str) -> Run:
    """Train the same steps in one process, without any op."""
    return trained(made(named(name)))


def model_is_distributed(model: nn.Module) -> bool:
    wrappers = (nn.parallel.DistributedDataParallel, FullyShardedDataParallel)
    return isinstance(model, wrappers) or hasattr(model, "unshard")


def unsharded(model: nn.Module) -> Any:
    """Return a context with whole parameters and gradients; FSDP2's DTensors need none."""
    if isinstance(model, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(model, with_grads=True)
    return contextlib.nullcontext()


def plain_name(name: str) -> str:
    """Return the name of a parameter in the model itself, without the names of wrappers."""
    kept = [part for part in name.split(".") if part not in WRAPPED]
    return ".".join(kept)


def full(x: Any) -> Tensor:
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    return x.clone()


def check(run: Run, family: Family = LLAMA) -> None:
    """Compare the loss and every gradient of each step with those in one process."""
    compare(run, expected(family.name))


def compare(run: Run, truth: Run) -> None:
    for (loss, grads), (true_loss, true_grads) in zip(run, truth, strict=True):
        torch.testing.assert_close(loss, true_loss, rtol=BOUND, atol=0.0)
        assert_same_gradients(grads, true_grads, BOUND)


class Graphs(list[Any]):
    """An inner backend that keeps the graphs, and the gradients of its results."""

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.append(module)
        return aot_eager(module, inputs)

    def nodes(self, name: str) -> list[torch.fx.Node]:
        """List the nodes that call an op or a function of this name."""
        return [
            node
            for module in self
            for node in module.graph.nodes
            if node.op == "call_function"
            and str(getattr(node.target, "__name__", "")).removesuffix(".default") == name
        ]
