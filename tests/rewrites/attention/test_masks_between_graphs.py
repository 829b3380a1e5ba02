"""A mask that one graph makes and another uses: attention is what it is in one graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

import liger_ops
from attention_graphs import MASKED, as_it_is, heads, results
from causal_models import LLAMA, assert_same_gradients, gradients
from data_masks import MASKS, on_the_cpu, right_padding
from liger_ops.rewrites import default_rewrites
from liger_ops.rewrites.attention.runtime import mask_outputs

LENGTH = 12
ONES = torch.ones(2, LENGTH, dtype=torch.int64)


class Attentions(list[str]):
    """An inner backend that records how attention is computed in each graph that has one."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        for part in module.modules():
            for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
                if node.target is F.scaled_dot_product_attention:
                    mask = "dense" if node.kwargs.get("attn_mask") is not None else "all"
                    self.append("causal" if node.kwargs.get("is_causal") else mask)
                elif node.target in MASKED:
                    self.append("masked")
        return self.inner(module, inputs)


def compiled(function: Callable[..., Any], inner: Any = aot_eager, **options: Any) -> Any:
    torch._dynamo.reset()
    made = Attentions(inner)
    options = {"inner_backend": made, "strict": True, **options}
    return torch.compile(function, backend=liger_ops.backend, options=options), made


def unchanged(mask: Tensor, data: Tensor) -> Tensor:
    return mask


def unfused(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor) -> Tensor:
    """As models write attention out."""
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~attn_mask, -1e38)
    return scores.softmax(-1) @ value


def in_two_graphs(
    name: str, change: Callable[[Tensor, Tensor], Any] = unchanged,
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention,
) -> Any:  # fmt: skip
    """Attention with a mask of a graph before; `change` is what happens in between, eagerly."""
    make, _ = MASKS[name]
    between = torch.compiler.disable(change)

    def run(query: Tensor, key: Tensor, value: Tensor, data: Tensor) -> Tensor:
        mask = between(make(LENGTH, LENGTH, data), data)
        return attend(query, key, value, attn_mask=mask)

    return run


def batch(data: Tensor) -> list[Tensor]:
    return [*(heads(2, 2, LENGTH, 16, seed) for seed in range(3)), data]


def check(rewritten: Callable[..., Any], function: Callable[..., Any], data: Tensor) -> None:
    # The data of the first run may be changed.
    both = results(rewritten, batch(data.clone())), results(function, batch(data.clone()))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("name", "attend", "padded"),
    [
        ("padding", F.scaled_dot_product_attention, ["dense"]),
        ("padding by index", F.scaled_dot_product_attention, ["dense"]),
        ("padding", unfused, []),
    ],
)
def test_a_mask_of_ones_is_causal_and_another_batch_is_not(name, attend, padded):
    function = in_two_graphs(name, attend=attend)
    rewritten, made = compiled(function)
    mask = right_padding(LENGTH)
    for data, also in ((ONES, []), (mask, padded), (mask.flip(-1), padded), (ONES, padded)):
        check(rewritten, function, data)
        assert made == ["causal", *also]


@pytest.mark.parametrize("name", ["padding", "packed by positions"])
def test_data_is_read_by_attention(name, monkeypatch):
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(default_rewrites, "NEEDS_INDUCTOR", frozenset())
    function, (_, data) = in_two_graphs(name), MASKS[name]
    rewritten, made = compiled(function, as_it_is)
    for one in (data(LENGTH), data(LENGTH).flip(0), data(LENGTH)):
        check(rewritten, function, one)
    assert made == ["masked"]


def written(mask: Tensor, data: Tensor) -> Tensor:
    mask = mask.clone()
    return mask.logical_and_(torch.eye(LENGTH, dtype=torch.bool))


def written_in_place(mask: Tensor, data: Tensor) -> Tensor:
    return mask.logical_and_(torch.eye(LENGTH, dtype=torch.bool))


def written_in_a_view(mask: Tensor, data: Tensor) -> Tensor:
    mask[0].logical_and_(torch.eye(LENGTH, dtype=torch.bool))
    return mask


def of_other_memory(mask: Tensor, data: Tensor) -> Tensor:
    mask.data = mask & torch.eye(LENGTH, dtype=torch.bool)
    return mask


def another(mask: Tensor, data: Tensor) -> Tensor:
    """A new mask, which may get the address of the first."""
    made = mask & torch.eye(LENGTH, dtype=torch.bool)
    del mask
    gc.collect()
    return made


@pytest.mark.parametrize(
    "change", [written, written_in_place, written_in_a_view, of_other_memory, another]
)
def test_a_mask_that_changed_is_read(change):
    function = in_two_graphs("padding", change)
    rewritten, made = compiled(function)
    check(rewritten, function, ONES)
    assert made == ["dense"]


def test_what_is_known_of_a_mask_goes_with_it():
    """The same graph gets the mask, a part of it, none, and the mask again."""
    changes: list[Callable[[Tensor, Tensor], Any]] = [unchanged, written, unchanged]
    function = in_two_graphs("padding", lambda mask, data: changes[0](mask, data))
    rewritten, made = compiled(function)
    for expected in (["causal"], ["causal", "dense"], ["causal", "dense"]):
        check(rewritten, function, ONES)
        assert made == expected
        del changes[0]
    changes.append(lambda mask, data: None)
    check(rewritten, function, ONES)
    assert made == ["causal", "dense", "all"]
    gc.collect()
    assert not len(mask_outputs._origins)


def test_data_that_is_written_after_the_mask_was_made():
    """The mask stays as it was made, and so does what attention sees."""

    def writes(mask: Tensor, data: Tensor) -> Tensor:
        data.zero_()
        return mask

    function = in_two_graphs("padding", writes)
    rewritten, made = compiled(function)
    check(rewritten, function, ONES)
    assert made == ["causal"]


def test_a_mask_that_is_returned_beside_a_view_of_it_is_dense():
    """Compiled, two outputs of the same memory may count their writes apart."""
    make, _ = MASKS["padding"]
    write = torch.compiler.disable(lambda one: one.zero_()[..., 0].fill_(True))

    def run(query: Tensor, key: Tensor, value: Tensor, data: Tensor) -> Tensor:
        mask = make(LENGTH, LENGTH, data)
        write(mask[:, 0])
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    rewritten, made = compiled(run)
    check(rewritten, run, ONES)
    assert made == ["dense"]


def test_symbolic_sizes_are_left():
    function = in_two_graphs("padding")
    torch._dynamo.reset()
    made = Attentions(aot_eager)
    options = {"inner_backend": made, "strict": True}
    check(
        torch.compile(function, backend=liger_ops.backend, dynamic=True, options=options),
        function,
        ONES,
    )
    assert made == ["dense"]


def test_models_with_hooks_train_as_eagerly():
    """The layers have hooks, as those of FSDP2 have, and are recomputed in the backward."""
    model: Any = LLAMA.model().train()
    model.set_attn_implementation("sdpa")
    hook = torch.compiler.disable(lambda module, args, kwargs: (args, kwargs))
    for layer in model.model.layers:
        layer.register_forward_pre_hook(hook, with_kwargs=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    rewritten, made = compiled(model)
    ids = torch.randint(1, 60, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    for mask in (ONES, right_padding(LENGTH), ONES):
        given = {"input_ids": ids, "attention_mask": mask, "labels": ids}
        loss = rewritten(**given).loss
        actual = gradients(model, loss)
        expected = model(**given).loss
        torch.testing.assert_close(loss, expected)
        assert_same_gradients(actual, gradients(model, expected))
    # PyTorch 2.11 compiles no attention of a checkpointed layer that has hooks.
    assert "causal" in made or (torch.__version__ < "2.12" and made == [])


def test_explain_tells_what_is_run():
    function = in_two_graphs("padding")
    counts = liger_ops.explain(function, *batch(ONES)).counts()
    assert counts["causal_attention"] == 1
    explained = liger_ops.explain(in_two_graphs("padding", written), *batch(ONES))
    assert "causal_attention" not in explained.counts()
    assert any("an input of the graph" in str(one.reason) for one in explained.left)
