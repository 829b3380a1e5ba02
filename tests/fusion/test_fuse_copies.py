"""A fused model is copied, cast, loaded and saved like the original model."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch

from causal_models import assert_trains_alike, batch
from fused_families import Family, output
from fused_models import GPT_OSS, LLAMA, fused_modules
from liger_ops.fusion import fuse, unfuse
from liger_ops.fusion.probing import undisturbed


def test_deepcopy_and_pickle() -> None:
    model, untouched = LLAMA.model(), LLAMA.model()
    count = len(fuse(model))
    x = LLAMA.inputs(torch.float32)
    expected = output(model, x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(fused_modules(copied)) == count
        assert torch.equal(output(copied, x), expected)
        assert_trains_alike(copied, untouched, **batch())
        ours = {id(parameter) for parameter in model.parameters()}
        assert ours.isdisjoint(id(parameter) for parameter in copied.parameters())
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(2)
        changed = output(copied, x)
        assert unfuse(copied) == count
        torch.testing.assert_close(output(copied, x), changed)
        assert not fused_modules(copied) and copied(**batch()).logits is not None
    assert torch.equal(output(model, x), expected)


def test_cast_after_fuse() -> None:
    model, untouched = LLAMA.model(), LLAMA.model().to(torch.bfloat16)
    fuse(model)
    model.to(torch.bfloat16)
    x = LLAMA.inputs(torch.bfloat16)
    fused_output = output(model, x)
    assert fused_output.dtype is torch.bfloat16
    cast_first = copy.deepcopy(untouched)
    fuse(cast_first)
    assert torch.equal(fused_output, output(cast_first, x))
    unfuse(model)
    assert torch.equal(output(model, x), output(untouched, x))


@pytest.mark.parametrize("assign", [False, True])
def test_load_after_fuse(assign: bool) -> None:
    """unfuse puts back the loaded values, whether they were copied or assigned."""
    model, other = LLAMA.model(), LLAMA.model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    fuse(model)
    model.load_state_dict(other.state_dict(), assign=assign)
    x = LLAMA.inputs(torch.float32)
    torch.testing.assert_close(output(model, x), output(other, x))
    parameters = dict(model.named_parameters())
    unfuse(model)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert torch.equal(output(model, x), output(other, x))


def test_model_made_on_meta() -> None:
    untouched = LLAMA.model()
    with torch.device("meta"):
        model = LLAMA.build()
        assert len(fuse(model)) == 10
        with undisturbed():
            assert not torch.empty(0).is_meta
    assert all(parameter.is_meta for parameter in model.parameters())
    model.load_state_dict(untouched.state_dict(), assign=True)
    assert not any(parameter.is_meta for parameter in model.parameters())
    model.model.rotary_emb.__init__(model.config)
    assert_trains_alike(model.train(), untouched, **batch())
    unfuse(model)
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("family", [LLAMA, GPT_OSS], ids=lambda family: family.name)
def test_saved_whole(family: Family, tmp_path: Path) -> None:
    model = family.model()
    count = len(fuse(model))
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    x = family.inputs(torch.float32)
    assert torch.equal(output(loaded, x), output(model, x))
    assert not fuse(loaded)
    assert unfuse(loaded) == count
    assert {type(module) for module in loaded.modules()} == {
        type(module) for module in family.model().modules()
    }


def test_replicas() -> None:
    """DataParallel's replicas of a module on each device."""
    model = LLAMA.model()
    fuse(model)
    mlp = model.model.layers[0].mlp
    replica = mlp._replicate_for_data_parallel()
    x = torch.randn(2, 32)
    assert type(replica) is type(mlp)
    assert torch.equal(replica(x), mlp(x))
