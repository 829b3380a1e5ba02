"""Tensor parallelism: fused and compiled models train as in one process."""

from __future__ import annotations

import contextlib
import warnings
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import loss_parallel
from transformers.distributed import DistributedConfig

import ranks
from adapted_heads import adapted, styled
from cross_entropy_cases import TERMS
from fused_families import EXPERTS, VOCABULARY, Family, text
from liger_ops import backend, fuse
from parallel_plans import parallel
from plans_of_transformers import loaded
from sharded_training import (
    GEMMA,
    LLAMA,
    MIXTURE,
    TRAINED,
    Graphs,
    Run,
    batch,
    check,
    compare,
    full,
    loss_of,
    made,
    trained,
)

pytestmark = pytest.mark.device_kernels

SECONDS = 400
OPTIONS: tuple[dict[str, Any], ...] = (TERMS, {"use_token_scaling": True}, {"reduction": "none"})


def mesh() -> Any:
    return ranks.mesh(names=("tp",))["tp"]


def without_warnings() -> AbstractContextManager[Any]:
    return warnings.catch_warnings(action="error", category=UserWarning)


def whole(model: Any, counts: dict[str, int]) -> None:
    """Fuse all parts of a model."""
    losses = {"linear_cross_entropy": 1}
    if "moe_experts" in counts:
        losses["router_losses"] = 1
    assert fuse(model).counts() == {**counts, **losses}


def fused_before_it_is_sharded() -> None:
    for family, sequence in ((LLAMA, True), (GEMMA, False)):
        model = made(family)
        whole(model, family.ops)
        with without_warnings():
            check(trained(parallel(model, mesh(), sequence, local_rows=sequence)), family)


def fused_after_it_is_sharded() -> None:
    for family, sequence in ((LLAMA, False), (GEMMA, True)):
        model = parallel(made(family), mesh(), sequence)
        whole(model, family.ops)
        with without_warnings():
            check(trained(model), family)


def the_vocabulary_stays_sharded() -> None:
    """Also where the model's own loss gets sharded logits, as within `loss_parallel`."""
    for around in (contextlib.nullcontext, loss_parallel):
        model = parallel(made(), mesh(), logits=Shard(-1))
        fuse(model)
        with without_warnings(), around():
            assert "logits" not in model(**batch(0, 1))
            check(trained(model))
    most = -(-VOCABULARY // dist.get_world_size())
    logits = "all_gather_into_tensor", batch(0, 1)["labels"].numel() * most * 4
    assert logits in moved(loss=False) and logits not in moved()


def moved(**switches: bool) -> list[tuple[str, int]]:
    """The collectives of a step of a fused model whose head would gather its logits."""
    model = parallel(made(), mesh())
    fuse(model, **switches)
    with ranks.Traffic() as traffic:
        loss_of(model)(**batch(0, 1)).backward()
    return traffic.seen


def norms_move_no_activations() -> None:
    ours = moved(loss=False)
    plain = moved(loss=False, norms=False, activations=False, rope=False, attention=False)
    assert ours == plain


def options_of_the_loss() -> None:
    one, model = made(), parallel(made(), mesh())
    for each in (one, model):
        fuse(each)
    rows = batch(0, 1)
    for options in OPTIONS:
        runs: list[Run] = []
        for each in (one, model):
            each.zero_grad()
            loss = each(**rows, **options).loss
            loss.sum().backward()
            runs.append([(loss.detach(), gradients(each))])
        compare(runs[1], runs[0])
    # Predicted tokens are those of all logits, which this head gathers.
    with pytest.warns(UserWarning, match="its head is sharded over words"):
        predicted = model(**rows, return_predicted_tokens=True).predicted_tokens
    assert torch.equal(predicted, one(**rows, return_predicted_tokens=True).predicted_tokens)


def options_without_all_logits() -> None:
    model = parallel(made(), mesh(), logits=Shard(-1))
    fuse(model)
    for options in ({"return_predicted_tokens": True}, {"skip_logits": False, "reduction": "sum"}):
        with pytest.raises(ValueError, match="its head returns the logits of a rank's words"):
            model(**batch(0, 1), **options)


def other_hooks_of_the_head_are_called() -> None:
    model, calls = parallel(made(), mesh()), []
    fuse(model)
    model.lm_head.register_forward_hook(lambda *given: calls.append(given))
    with pytest.warns(UserWarning, match="its head has hooks"):
        check(trained(model))
    assert len(calls) == 3


def loaded_with_a_plan_of_transformers() -> None:
    """Norms of heads, packed experts, a tied head: the style of each is kept."""
    # Before torch 2.13, DTensor does not gather the gradients of packed experts.
    for family in TRAINED if torch.__version__ >= "2.13" else (LLAMA, GEMMA):
        one = made(family)
        model = loaded(one, experts_of(family), tp_plan="auto", tp_size=dist.get_world_size())
        # A step before: the styles register hooks of parameters in the first forward.
        loss_of(model)(**batch(0, 1)).backward()
        model.zero_grad()
        counts = family.ops
        whole(model, counts)
        with ranks.Traffic() as traffic:
            assert "logits" not in model(**batch(0, 1))
        assert {name: traffic.ops[name] for name in counts} == counts
        with without_warnings():
            compare(trained(model), trained(one))


def experts_on_ranks() -> None:
    """A rank holds whole experts, and ids of the other ranks' experts are sentinels."""
    # A head of keys and an expert for each of four ranks.
    sizes = {"num_experts": 4, "moe_intermediate_size": 16, "num_key_value_heads": 4}
    one = made(text("Qwen3Moe", 9, "moe_experts", **sizes, **EXPERTS))
    world = dist.get_world_size()
    model = loaded(one, "grouped_mm", ep_size=world, tp_plan="auto", tp_size=world)
    loss_of(model)(**batch(0, 1)).backward()
    model.zero_grad()
    whole(model, MIXTURE.ops)
    with ranks.Traffic() as traffic:
        model(**batch(0, 1))
    assert traffic.ops["moe_experts"] == MIXTURE.ops["moe_experts"]
    with without_warnings():
        compare(trained(model), trained(one))


def experts_of(family: Family) -> str | None:
    return "batched_mm" if family is MIXTURE else None


def layers_are_rewritten() -> None:
    graphs = Graphs()
    for family, sequence in ((LLAMA, True), (GEMMA, False)):
        model = parallel(made(family), mesh(), sequence)
        for layer in model.model.layers:
            layer.compile(backend=backend, options={"inner_backend": graphs, "strict": True})
        check(trained(model), family)
    for name in ("rope", "swiglu", "geglu", "fused_add_rms_norm", "rms_norm"):
        assert graphs.nodes(name), name


def the_whole_model_is_compiled() -> None:
    """A fused model is one graph. Norms of DTensors are fused by `fuse` alone."""
    graphs, model = Graphs(), made()
    fuse(model)
    model = parallel(model, mesh())
    options = {"inner_backend": graphs, "strict": True}
    check(trained(model, torch.compile(loss_of(model), backend=backend, options=options)))
    assert len(graphs) == 1
    counts = {"rope": 2, "swiglu": 2, "rms_norm": 5, "cross_entropy": 0}
    assert {name: len(graphs.nodes(name)) for name in counts} == counts


# Before 5.20, transformers splits each expert over the ranks, and cannot give a rank whole experts.
ON_RANKS = [experts_on_ranks] if "ep_size" in DistributedConfig.__dataclass_fields__ else []
CHECKS = [
    *ON_RANKS,
    fused_before_it_is_sharded,
    fused_after_it_is_sharded,
    the_vocabulary_stays_sharded,
    norms_move_no_activations,
    options_of_the_loss,
    options_without_all_logits,
    other_hooks_of_the_head_are_called,
    loaded_with_a_plan_of_transformers,
    layers_are_rewritten,
    the_whole_model_is_compiled,
]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: full(one.grad) for name, one in model.named_parameters()}


def sharded_twice() -> None:
    """FSDP2 over one dimension of a mesh, tensor parallelism over the other, and `fuse` before,
    between or after them."""
    grid = ranks.mesh(2, 2, names=("data", "tp"))
    cases = [(LLAMA, True, 0, False), (LLAMA, False, 1, True), (GEMMA, True, 2, False)]
    for family, sequence, when, by_itself in cases:
        model = made(family)
        for step in range(3):
            if step == when:
                whole(model, family.ops)
            if step == 0:
                parallel(model, grid["tp"], sequence)
            if step == 1:
                sharded_over(model, grid["data"], by_itself)
        with without_warnings():
            check(trained(model, group=grid["data"].get_group()), family)


def adapters_are_sharded_twice() -> None:
    grid, model = ranks.mesh(2, 2, names=("data", "tp")), adapted(made())
    fuse(model)
    inner = styled(model, grid["tp"]).base_model.model
    sharded_over(inner, grid["data"], head_by_itself=False)
    with without_warnings():
        run = trained(inner, group=grid["data"].get_group())
    compare(run, trained(adapted(made()).base_model.model))


def sharded_twice_by_plans_of_transformers() -> None:
    """Packed experts, whose shards FSDP2 shards again."""
    one = made(MIXTURE)
    model = loaded(one, experts_of(MIXTURE), tp_plan="auto", tp_size=2, fsdp_size=2)
    fuse(model)
    with ranks.Traffic() as traffic, warnings.catch_warnings():
        # FSDP2 warns of the embedding's view.
        warnings.filterwarnings("error", message="liger_ops")
        run = trained(model, group=model._device_mesh["fsdp"].get_group())
    assert all(traffic.ops[name] for name in MIXTURE.ops)
    compare(run, trained(one))


def sharded_over(model: Any, over: Any, head_by_itself: bool) -> None:
    if head_by_itself:
        fully_shard([model.model.norm, model.lm_head], mesh=over)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=over)


WITH_FOUR = [sharded_twice, adapters_are_sharded_twice, *ON_RANKS]
if torch.__version__ >= "2.13":
    # transformers 5.17 with torch 2.11 fails to load shards of shards.
    WITH_FOUR.append(sharded_twice_by_plans_of_transformers)

test_fused_tensor_parallel = ranks.tests({2: CHECKS, 4: WITH_FOUR}, SECONDS)
