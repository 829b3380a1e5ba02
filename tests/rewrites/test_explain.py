"""`explain` says what would be used, what is left and why, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import liger_ops
from backends import inductor_calls, inputs, model
from rewriting import values

pytestmark = pytest.mark.usefixtures("empty_caches")


@pytest.fixture
def given_to_inductor(monkeypatch) -> list[dict[str, Any]]:
    return inductor_calls(monkeypatch)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8, eps=1e-6)
        self.whole = nn.RMSNorm(8)
        self.batch = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, *, broken: bool = False) -> Tensor:
        self.calls.add_(1)
        x = F.dropout(self.batch(x), 0.5)
        if broken:
            torch._dynamo.graph_break()
        x = self.norm(x) + self.norm(x * 2)
        return self.whole(F.silu(x) * x)


def test_explain_finds_what_is_used_and_what_is_not():
    explanation = liger_ops.explain(Norms(), values(4, 8))
    assert explanation.counts() == {"rms_norm": 2, "swiglu": 1}
    assert (explanation.graphs, explanation.graph_breaks) == (1, ())
    used = [finding for finding in explanation.findings if finding.used]
    (left,) = (finding for finding in explanation.findings if not finding.used)
    assert left.op == "rms_norm" and "eps=None" in left.reason
    assert "test_explain.py:" in left.where
    assert "return self.whole(F.silu(x) * x)" in left.where
    assert {finding.device for finding in used} == {"cpu"}
    lines = {finding.op: finding.where for finding in used}
    assert "x = self.norm(x) + self.norm(x * 2)" in lines["rms_norm"]


def test_explain_tells_of_graph_breaks():
    explanation = liger_ops.explain(Norms(), values(4, 8), broken=True)
    assert explanation.counts() == {"rms_norm": 2, "swiglu": 1}
    assert explanation.graphs == 2
    (reason,) = explanation.graph_breaks
    assert "graph_break" in reason and "\n" not in reason


@pytest.mark.parametrize("broken", [False, True])
def test_explain_changes_nothing(broken):
    torch.manual_seed(3)
    module, x = Norms(), values(4, 8)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.get_rng_state()
    attributes = dict(vars(module))
    liger_ops.explain(module, x, broken=broken)
    assert torch.equal(torch.get_rng_state(), random)
    assert module.state_dict().keys() == state.keys()
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name
    # PyTorch's own mark on every module that torch.compile is given.
    assert set(vars(module)) - {"_is_torch_compile"} == set(attributes)
    assert all(vars(module)[name] == value for name, value in attributes.items())
    assert all(parameter.grad is None for parameter in [*module.parameters(), x])


def test_explain_prints_a_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = str(liger_ops.explain(Norms(), values(4, 8), broken=True)).splitlines()
    assert lines[0] == "2 graphs, 1 graph break"
    assert [len(line) for line in lines if len(line) > 100] == []
    (used,) = (line for line in lines if "1 x swiglu" in line)
    assert liger_ops.library.implementation(liger_ops.library.OPS["swiglu"], "") in used
    assert "left to Inductor" in " ".join(lines)
    assert "3 ops used" in lines and "1 place left" in lines
    assert lines.count("  Nothing is faster on cpu, where there are no kernels.") == 1


def test_explain_of_a_function():
    explanation = liger_ops.explain(model, *inputs())
    assert explanation.counts() == {"rms_norm": 1, "swiglu": 1}
    assert "0 graph breaks" in str(explanation)


def test_explain_compiles_nothing(given_to_inductor):
    liger_ops.explain(model, *inputs())
    assert given_to_inductor == []


def test_explain_of_a_model_that_raises():
    def failing(x: Tensor) -> Tensor:
        raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"):
        liger_ops.explain(failing, values(2))


def test_explain_of_a_batch_that_is_not_unpacked():
    """A model that takes a dictionary is given one."""

    class OfBatch(nn.Module):
        def forward(self, batch):
            return F.rms_norm(batch["x"], (8,), eps=1e-6)

    assert liger_ops.explain(OfBatch(), {"x": torch.ones(2, 8)}).counts() == {"rms_norm": 1}
    with pytest.raises(TypeError, match=r"only argument, a dict .* as explain\(model, \*\*batch\)"):
        liger_ops.explain(nn.Embedding(3, 8), {"input": torch.ones(2, dtype=torch.int64)})
