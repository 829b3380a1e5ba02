"""`liger_ops.enable()`: every compilation by Inductor is rewritten, until `disable()`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx as inductor
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

import liger_ops
from backends import inputs, model, needs_compiler, without_caches
from liger_ops.rewrites import enable as pass_module
from liger_ops.rewrites.enable import Together
from liger_ops.rewrites.engine.report import Report

pytestmark = pytest.mark.usefixtures("empty_caches")


@pytest.fixture
def reports(monkeypatch) -> Iterator[list[Report]]:
    """The findings of the pass. No cache is read."""
    found: list[Report] = []

    def recorded(*args: Any, **options: Any) -> Report:
        found.append(rewrite(*args, **options))
        return found[-1]

    rewrite = pass_module.rewrite
    monkeypatch.setattr(pass_module, "rewrite", recorded)
    with without_caches():
        yield found
    liger_ops.disable()


def counts(reports: list[Report]) -> dict[str, int]:
    return dict(sum((Counter(report.counts()) for report in reports), Counter()))


@needs_compiler
def test_a_plain_compile_of_an_untouched_function(reports):
    def head(x: Tensor, weight: Tensor, words: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(model(x, weight), words), target)

    x, weight = inputs()
    words, target = torch.randn(11, 8), torch.tensor([1, 2, 3])
    liger_ops.enable()
    loss = torch.compile(head)(x[0], weight, words, target)
    torch.testing.assert_close(loss, head(x[0], weight, words, target))
    assert counts(reports) == {"linear_cross_entropy": 1}
    torch._dynamo.reset()
    liger_ops.disable()
    torch.compile(head)(x[0], weight, words, target)
    assert len(reports) == 1


@needs_compiler
def test_as_a_context_with_every_rewrite(reports):
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return model(checkpoint(model, x, weight, use_reentrant=False), weight)

    with liger_ops.enable("all"):
        y = torch.compile(function)(*inputs())
        y.sum().backward()
    torch.testing.assert_close(y, function(*inputs()))
    # One report has the findings of the block and of the outer graph.
    assert [report.counts() for report in reports] == [{"rms_norm": 2, "swiglu": 2}]


def test_an_exported_model_is_left_as_it_is(reports):
    module = torch.export.export(torch.nn.RMSNorm(8, eps=1e-6), (torch.ones(2, 8),)).graph_module
    before = str(module.graph)
    liger_ops.enable("all").ours(module.graph)
    assert str(module.graph) == before and reports == []


class Renaming(pass_module.CustomGraphPass):
    """A user's own pass."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.calls += 1

    def uuid(self) -> str:
        return "renaming"


@pytest.fixture
def passes_alone(monkeypatch) -> None:
    """In place of Inductor: its passes before autograd, and nothing more."""

    def compile_fx(module: fx.GraphModule, example_inputs: Any, **how: Any) -> Any:
        with inductor_config.patch(how["config_patches"]):
            setting = inductor_config.pre_grad_custom_pass
        several = isinstance(setting, (tuple, list))
        for one in setting if several else [setting] if setting else []:
            one(module.graph)
        module.recompile()
        return module.forward

    monkeypatch.setattr(inductor, "compile_fx", compile_fx)


@pytest.mark.parametrize("kind", [tuple, list, "single"])
def test_a_pass_of_the_user_runs_first_and_stays(reports, passes_alone, kind):
    theirs, later = Renaming(), Renaming()
    setting = theirs if kind == "single" else kind([theirs])
    with inductor_config.patch(pre_grad_custom_pass=setting):
        with liger_ops.enable(["swiglu"]) as call:
            assert inductor_config.pre_grad_custom_pass == setting
            torch.compile(model)(*inputs())
            assert theirs.calls == 1 and counts(reports) == {"swiglu": 1}
            inductor_config.pre_grad_custom_pass = later
            torch._dynamo.reset()
            torch.compile(model)(*inputs())
            assert later.calls == theirs.calls == 1 and counts(reports) == {"swiglu": 2}
        assert inductor_config.pre_grad_custom_pass is later
    uuid = Together((theirs,), call.ours).uuid()
    assert "renaming" in uuid and liger_ops.graph_pass(["swiglu"]).uuid() in uuid


@needs_compiler
def test_passes_of_the_user_in_inductor(reports):
    theirs, of_a_call = Renaming(), Renaming()
    with inductor_config.patch(pre_grad_custom_pass=theirs), liger_ops.enable("all"):
        torch.compile(model, options={"pre_grad_custom_pass": of_a_call})(*inputs())
        assert of_a_call.calls == 1 and theirs.calls == 0 and reports == []
        torch._dynamo.reset()
        torch.compile(model)(*inputs())
    assert theirs.calls == 1 and counts(reports) == {"rms_norm": 1, "swiglu": 1}


def test_calls_nest(reports, passes_alone):
    """Each call undoes itself, in any order; Inductor's function is its own after the last."""
    before = inductor.compile_fx

    def found() -> dict[str, int]:
        reports.clear()
        torch._dynamo.reset()
        torch.compile(model)(*inputs())
        return counts(reports)

    liger_ops.enable(["rms_norm"])
    with liger_ops.enable(["swiglu"]) as inner:
        assert found() == {"swiglu": 1}
        last = liger_ops.enable("all")
        assert found() == {"rms_norm": 1, "swiglu": 1}
        inner.__exit__()
        assert found() == {"rms_norm": 1, "swiglu": 1}
        last.__exit__()
        assert found() == {"rms_norm": 1}
    liger_ops.enable(["rms_norm"])
    liger_ops.disable()
    assert found() == {"rms_norm": 1}
    liger_ops.disable()
    assert found() == {} and inductor.compile_fx is before
    liger_ops.disable()
    assert inductor.compile_fx is before


class InBackward(torch.autograd.Function):
    """The identity, whose backward compiles `model`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        torch.compile(model)(*inputs())
        return dy


@needs_compiler
@pytest.mark.parametrize(
    ("where", "started"), [("forward", "after"), ("backward", "before")], ids=str
)
def test_other_threads(reports, where, started):
    """A thread has its own settings of Inductor, which are the defaults when it starts."""
    go, found = threading.Event(), []

    def compiles() -> None:
        go.wait()
        with without_caches():
            if where == "backward":
                InBackward.apply(torch.ones(2, requires_grad=True)).sum().backward()
            else:
                torch.compile(model)(*inputs())
        found.append(counts(reports))

    thread = threading.Thread(target=compiles)
    if started == "before":
        thread.start()
    with liger_ops.enable("all"):
        if started == "after":
            thread.start()
        go.set()
        thread.join()
    assert found == [{"rms_norm": 1, "swiglu": 1}]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"rewrites": ["no_such"]}, ValueError, "'no_such'"),
        ({"rewrites": 5}, TypeError, "rewrites must be .* got int"),
        ({"strict": 1}, TypeError, "strict must be a bool or None, got int"),
    ],
)
def test_bad_arguments_change_nothing(arguments, error, text):
    before = inductor.compile_fx
    with pytest.raises(error, match=text):
        liger_ops.enable(**arguments)
    assert inductor.compile_fx is before
