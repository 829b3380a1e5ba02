"""`fuse` and `unfuse` on transformers models: all parts, results, a single graph, and undoing."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from backends import Inner
from fused_families import FAMILIES, Family, output
from fused_models import FAMILY, LLAMA, fused_modules, gradient_of, results
from graphs import Recorder, liger_ops_of
from liger_ops.fusion import fuse, unfuse


@FAMILY
@pytest.mark.quick("family")
def test_every_part_is_fused(family: Family) -> None:
    model = family.model()
    report = fuse(model, attention=False)
    assert Counter(entry.op for entry in report.fused) == family.parts
    assert all("its loss is a classifier's" in entry.reason for entry in report.left)
    # One module has the losses of words and of routers.
    assert len(fused_modules(model)) == len({entry.where for entry in report.fused})
    assert len(report) == sum(family.parts.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@FAMILY
@pytest.mark.quick("family")
def test_results_are_as_near_to_truth_as_before(family: Family, dtype: torch.dtype) -> None:
    """Output and every gradient, against the untouched model in float64 with the same weights.

    The fused model rounds where the untouched one does in the forward, and less often in the
    backward, but sums in another order. Its error may be at most twice the untouched model's plus
    one rounding to the dtype, each as a norm over the tensor. A gradient that is zero up to
    rounding, such as that of a key's bias, is measured relative to a thousandth of the whole
    model's gradient.
    """
    untouched = family.model().to(dtype)
    fused = copy.deepcopy(untouched)
    assert fuse(fused)
    truth = results(copy.deepcopy(untouched).double(), family.inputs(torch.float64))
    before = results(untouched, family.inputs(dtype))
    after = results(fused, family.inputs(dtype))
    assert after.keys() == before.keys() == truth.keys()
    whole = torch.stack([value.norm() for name, value in truth.items() if name != "output"]).norm()
    for name, true in truth.items():
        assert after[name].dtype is dtype
        scale = max(true.norm(), 1e-3 * whole)
        error_before = ((before[name].double() - true).norm() / scale).item()
        error_after = ((after[name].double() - true).norm() / scale).item()
        bound = 2 * error_before + torch.finfo(dtype).eps
        assert error_after <= bound, (
            f"{name}: {error_after:.2e} from truth after, {error_before:.2e} before"
        )


# A family for each set of ops, whose graphs AOT autograd traces.
WITH_AUTOGRAD = {frozenset(family.ops): family for family in reversed(FAMILIES)}.values()


@FAMILY
def test_compiles_whole(family: Family) -> None:
    """One graph, with each op as one node forward and one backward; results equal eager's."""
    model = family.model()
    fuse(model)
    x = family.inputs(torch.float32)
    eager = results(model, x)
    torch._dynamo.reset()
    recorder, inner = Recorder(), Inner()
    traces = family in WITH_AUTOGRAD
    compiled = torch.compile(model, fullgraph=True, backend=recorder.backend() if traces else inner)
    y = output(compiled, x)
    model.zero_grad()
    y.backward(gradient_of(y))
    forwards = recorder.forwards if traces else inner.graphs
    assert len(forwards) == 1 and len(recorder.backwards) == traces
    assert liger_ops_of(forwards) == (family.forwards if traces else family.ops)
    backward = {f"{op}_backward": count for op, count in family.ops.items()}
    assert not traces or liger_ops_of(recorder.backwards) == backward
    torch.testing.assert_close(y, eager["output"])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, eager[name], rtol=1e-4, atol=1e-4)


def test_a_layer_compiles_once_for_all_sizes() -> None:
    model = LLAMA.model()
    fuse(model)
    layer = model.model.layers[0]
    torch._dynamo.reset()
    recorder = Recorder()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=recorder.backend())
    for B, S in ((2, 7), (3, 11)):
        x = torch.randn(B, S, 32, generator=torch.Generator().manual_seed(1))
        tables = model.model.rotary_emb(x, torch.arange(S)[None].expand(B, -1))
        y = compiled(x, position_embeddings=tables)
        torch.testing.assert_close(y, layer(x, position_embeddings=tables))
    assert liger_ops_of(recorder.forwards) == {"rms_norm": 2, "rope": 1, "swiglu": 1}


@FAMILY
def test_unfuse_restores_the_model(family: Family) -> None:
    model = family.model()
    classes = {name: type(module) for name, module in model.named_modules()}
    modules = dict(model.named_modules())
    x = family.inputs(torch.float32)
    before = output(model, x)
    count = len(fuse(model))
    model.eval()
    assert unfuse(model) == count
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert all(module is modules[name] for name, module in model.named_modules())
    assert not any(module.training for module in model.modules())
    assert torch.equal(output(model.train(), x), before)
    assert unfuse(model) == 0
