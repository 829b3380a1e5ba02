"""Calls of a model with fused loss: every way to ask for the loss, and the values returned."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from causal_models import (
    CAUSAL,
    LLAMA,
    assert_same_gradients,
    assert_same_output,
    assert_trains_alike,
    batch,
    gradients,
    pair,
    with_fused_loss,
)
from fused_families import Family

WAYS: dict[str, dict[str, Any]] = {
    "tensor of a count": {"num_items_in_batch": torch.tensor(9)},
    "count": {"num_items_in_batch": 9},
    "count of a replica": {"num_items_in_batch": torch.tensor([[9]])},
    "float count": {"num_items_in_batch": torch.tensor(9.0)},
    "shifted labels": {"shift_labels": batch(3)["labels"][1:]},
    "another index ignored": {
        "ignore_index": 5,
        "labels": torch.where(batch()["labels"] < 20, 5, batch()["labels"]),
    },
    "the empty logits_to_keep": {"logits_to_keep": 0},
    "hidden states": {"output_hidden_states": True},
    "skip_logits": {"skip_logits": True},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("family", [LLAMA, CAUSAL[-3]], ids=lambda family: family.name)
def test_ways_to_ask(family: Family, way: dict[str, Any]) -> None:
    model, fused = pair(family)
    output = assert_trains_alike(fused, model, **{**batch(), **way})
    assert ("hidden_states" in output) == ("output_hidden_states" in way)


def test_what_is_returned() -> None:
    """transformers' convention for absent values: None by name, and not counted by index."""
    model, fused = pair()
    output = fused(**batch(), output_hidden_states=True)
    assert isinstance(output, type(model(**batch())))
    assert output.logits is None
    assert list(output) == ["loss", "hidden_states"]
    assert output[0] is output.loss is output["loss"]
    assert output[1] is output.hidden_states
    values = fused(**batch(), output_hidden_states=True, return_dict=False)
    assert [type(value) for value in values] == [Tensor, tuple]
    assert torch.equal(values[0], output.loss)


def test_absent_logits_that_are_read_tell_of_fuse() -> None:
    """Nothing is said where all fields are read, and a copy is as transformers makes it."""
    model, fused = pair()
    output = fused(**batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "loss=" in repr(output) and "logits" not in output
        assert (output.to_tuple(), output.get("logits")) == ((output.loss,), None)
        leaves, form = pytree.tree_flatten(output)
        assert list(pytree.tree_unflatten(leaves, form)) == list(copy.copy(output)) == ["loss"]
        copied = pickle.loads(pickle.dumps(output))
        assert type(copied) is type(model(**batch())) and list(copied) == ["loss"]
        assert fused(**batch(), skip_logits=False).logits is not None
        assert fused.eval()(**batch()).logits is not None
    with pytest.warns(UserWarning, match=r"fuse\(model\) skips.* skip_logits=False\) returns them"):
        assert output.logits is None
    with pytest.warns(UserWarning, match="fuse"), pytest.raises(AttributeError):
        output.logits.float()


def test_labels_by_position() -> None:
    model, fused = pair()
    names = list(inspect.signature(model.forward).parameters)
    given = batch()
    inputs = [given.get(name) for name in names[: names.index("labels") + 1]]
    output = fused(*inputs)
    assert output.logits is None
    torch.testing.assert_close(output.loss, model(*inputs).loss)


def test_skip_logits_false_gives_logits() -> None:
    model, fused = pair()
    assert_same_output(fused(**batch(), skip_logits=False), model(**batch()))


def test_skip_logits_in_evaluation() -> None:
    model, fused = pair()
    output = fused.eval()(**batch(), skip_logits=True)
    assert output.logits is None
    torch.testing.assert_close(output.loss, model.eval()(**batch()).loss)


@pytest.mark.parametrize("keep", [3, torch.tensor([1, 4])], ids=["count", "positions"])
def test_logits_to_keep(keep: Any) -> None:
    model, fused = pair()
    labels = batch()["labels"][:, : 3 if isinstance(keep, int) else 2]
    inputs = {**batch(), "labels": labels, "logits_to_keep": keep}
    assert_same_output(fused(**inputs), model(**inputs))
    with pytest.raises(ValueError, match="skip_logits=True and logits_to_keep were given"):
        fused(**inputs, skip_logits=True)


def test_skip_logits_without_labels() -> None:
    _, fused = pair()
    with pytest.raises(ValueError, match="LlamaForCausalLM: skip_logits=True and no labels"):
        fused(batch()["input_ids"], skip_logits=True)


def test_no_gradients() -> None:
    model, fused = pair()
    with torch.no_grad():
        output = fused(**batch())
    assert output.logits is None
    assert not output.loss.requires_grad
    torch.testing.assert_close(output.loss, model(**batch()).loss)


def test_second_backward_accumulates() -> None:
    model, fused = pair()
    for one in (model, fused):
        one(**batch()).loss.backward()
        one(**batch(3, 5)).loss.backward()
    grads = [{name: p.grad for name, p in one.named_parameters()} for one in (fused, model)]
    assert_same_gradients(*grads)


@pytest.mark.parametrize("use", ["bfloat16", "autocast"])
def test_lower_precision_is_as_near_to_truth(use: str) -> None:
    """Loss and gradients, against the untouched model in float64 with the same weights."""
    model = LLAMA.model()
    if use == "bfloat16":
        model.bfloat16()
    truth, fused = copy.deepcopy(model).double(), with_fused_loss(model)
    values, grads = [], []
    for one in (fused, model, truth):
        with torch.autocast("cpu", torch.bfloat16, enabled=use == "autocast" and one is not truth):
            value = one(**batch()).loss
        values.append(value)
        grads.append(gradients(one, value))
    assert values[0].dtype is torch.float32
    after, before = ((value.double() - values[2]).abs() for value in values[:2])
    assert after <= 2 * before + 1e-3 * values[2]
    whole = torch.stack([grad.norm() for grad in grads[2].values()]).norm()
    for name, true in grads[2].items():
        after, before = ((grad[name].double() - true).norm() for grad in grads[:2])
        assert after <= 2 * before + 2**-7 * max(true.norm(), 1e-3 * whole), name


def test_call_that_raises_leaves_nothing_behind() -> None:
    model, fused = pair()
    with pytest.raises(ValueError, match="linear_cross_entropy: target"):
        fused(input_ids=batch()["input_ids"], labels=batch(3)["labels"])
    assert_trains_alike(fused, model, **batch())


def test_threads_do_not_meet() -> None:
    """Concurrent calls of one model, each with its own hidden states and labels."""
    _, fused = pair()
    batches = [batch(rows, columns) for rows in (2, 3) for columns in (5, 6, 7, 8)]
    expected = [fused(**inputs).loss.item() for inputs in batches]
    actual: dict[int, list[float]] = {}

    def work(i: int) -> None:
        actual[i] = [fused(**batches[i]).loss.item() for _ in range(5)]

    threads = [Thread(target=work, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert actual == {i: [value] * 5 for i, value in enumerate(expected)}
