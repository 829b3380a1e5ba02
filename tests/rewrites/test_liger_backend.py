"""`torch.compile(model, backend="liger")`: found by its name, with its options and Inductor's."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops
from backends import Inner, inductor_calls, inputs, model, needs_compiler, run
from rewriting import values

ENTRY_POINTS = importlib.metadata.entry_points(group="torch_dynamo_backends", name="liger")
by_name = pytest.mark.skipif(
    not ENTRY_POINTS, reason="liger_ops is not installed, so that it has no entry point"
)


pytestmark = pytest.mark.usefixtures("empty_caches")


@pytest.fixture
def given_to_inductor(monkeypatch) -> list[dict[str, Any]]:
    return inductor_calls(monkeypatch)


BY_NAME = """
import sys
import torch
import torch.nn.functional as F

def inner(module, example_inputs):
    print(*(node.target for node in module.graph.nodes if "liger" in str(node.target)))
    return module.forward

assert "liger" in torch.compiler.list_backends()
assert "liger_ops" not in sys.modules
function = lambda gate, up: F.silu(gate) * up
compiled = torch.compile(function, backend="liger", options={"inner_backend": inner})
gate, up = torch.randn(2, 8), torch.randn(2, 8)
torch.testing.assert_close(compiled(gate, up), function(gate, up))
"""


@by_name
def test_it_is_found_by_its_name_alone():
    assert run(BY_NAME).split() == ["liger.swiglu.default"]


def test_importing_the_package_does_not_load_dynamo():
    loaded = "print(sum(name.startswith('torch._dynamo') for name in sys.modules))"
    before, after = run(f"import sys, torch; {loaded}; import liger_ops; {loaded}").split()
    assert before == after


def test_an_inner_backend_gets_the_rewritten_graph():
    inner = Inner()
    compiled = torch.compile(
        model, backend=liger_ops.backend, fullgraph=True, options={"inner_backend": inner}
    )
    torch.testing.assert_close(compiled(*inputs()), model(*inputs()))
    assert inner.ops() == ["rms_norm", "swiglu"]
    assert inner.options == {}


def test_an_inner_backend_by_its_name():
    options = {"inner_backend": "aot_eager"}
    compiled = torch.compile(model, backend=liger_ops.backend, options=options)
    x, weight = inputs()
    ours, theirs = inputs()
    torch.testing.assert_close(compiled(ours, theirs), model(x, weight))
    compiled(ours, theirs).sum().backward()
    model(x, weight).sum().backward()
    torch.testing.assert_close((ours.grad, theirs.grad), (x.grad, weight.grad))


def test_an_unknown_inner_backend():
    options = {"inner_backend": "no_such_backend"}
    compiled = torch.compile(model, backend=liger_ops.backend, options=options)
    with pytest.raises(Exception, match="no_such_backend"):
        compiled(*inputs())


@pytest.mark.parametrize(
    ("rewrites", "found"),
    [
        (["rms_norm"], ["rms_norm"]),
        ("swiglu", ["swiglu"]),
        ("all", ["rms_norm", "swiglu"]),
        ((), []),
        (["rope", "swiglu"], ["swiglu"]),
    ],
    ids=str,
)
def test_rewrites_that_are_chosen(rewrites, found):
    inner = Inner()
    options = {"inner_backend": inner, "rewrites": rewrites}
    compiled = torch.compile(model, backend=liger_ops.backend, options=options)
    torch.testing.assert_close(compiled(*inputs()), model(*inputs()))
    assert inner.ops() == found


def test_a_rewrite_that_there_is_not():
    options = {"inner_backend": Inner(), "rewrites": ["rms_norm", "no_such_rewrite"]}
    compiled = torch.compile(model, backend=liger_ops.backend, options=options)
    with pytest.raises(Exception, match="ValueError: .*'no_such_rewrite'.*linear_cross_entropy"):
        compiled(*inputs())
    with pytest.raises(ValueError, match="'no_such_rewrite'"):
        liger_ops.graph_pass(["no_such_rewrite"])


def test_inductor_gets_the_mode_and_its_options(given_to_inductor):
    compile = lambda **how: torch.compile(model, backend=liger_ops.backend, **how)
    compile()(*inputs())
    torch._dynamo.reset()
    compile(mode="max-autotune-no-cudagraphs")(*inputs())
    torch._dynamo.reset()
    compile(options={"epilogue_fusion": False, "rewrites": "all"})(*inputs())
    plain, mode, options = (call["config"] for call in given_to_inductor)
    assert "max_autotune" not in plain
    assert mode["max_autotune"] is True
    assert options["epilogue_fusion"] is False
    assert "rewrites" not in options
    # By default norms and activations do not change.
    counts = [sum("liger" in str(target) for target in call["nodes"]) for call in given_to_inductor]
    assert counts == [0, 0, 2]


def test_by_default_inductor_gets_what_pays(given_to_inductor):
    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(F.silu(x) * x, weight), target)

    compiled = torch.compile(loss, backend=liger_ops.backend)
    compiled(values(3, 8), values(11, 8), torch.tensor([1, 2, 3]))
    (call,) = given_to_inductor
    ops = [str(target) for target in call["nodes"] if "liger" in str(target)]
    assert ops == ["liger.linear_cross_entropy.default"]


@pytest.mark.parametrize(
    ("name", "inner"),
    # Another inner backend may have an option of any name that is not nearly one of ours.
    [("rewrite", "inductor"), ("no_such_option", "inductor"), ("rewrite", "aot_eager")],
)
def test_an_option_that_nobody_has(name, inner):
    """The names of this backend's own options come first, without the hundreds of Inductor's."""
    options = {name: "all", "inner_backend": inner}
    compiled = torch.compile(model, backend=liger_ops.backend, options=options)
    with pytest.raises(Exception, match=f"options has '{name}'") as raised:
        compiled(*inputs())
    text = str(raised.value)
    assert ("Did you mean 'rewrites'?" in text) == (name == "rewrite")
    assert "'inner_backend', 'mode', 'padding', 'rewrites', 'strict'" in text
    assert len(text) < 1000


def test_fullgraph():
    def broken(x: Tensor, weight: Tensor) -> Tensor:
        x = model(x, weight)
        torch._dynamo.graph_break()
        return model(x, weight)

    inner = Inner()
    compile = lambda **how: torch.compile(
        broken, backend=liger_ops.backend, options={"inner_backend": inner}, **how
    )
    torch.testing.assert_close(compile()(*inputs()), broken(*inputs()))
    assert len(inner.graphs) == 2 and inner.ops() == ["rms_norm", "swiglu"] * 2
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile(fullgraph=True)(*inputs())


def test_dynamic():
    inner = Inner()
    compiled = torch.compile(
        model, backend=liger_ops.backend, dynamic=True, options={"inner_backend": inner}
    )
    for rows in (2, 5, 7):
        x, weight = values(rows, 3, 8), values(8)
        torch.testing.assert_close(compiled(x, weight), model(x, weight))
    assert len(inner.graphs) == 1 and inner.ops() == ["rms_norm", "swiglu"]


@needs_compiler
def test_inductor():
    """With Inductor and gradients, then in a mode that the function has not been compiled in."""
    x, weight = inputs()
    ours, theirs = inputs()
    options = {"rewrites": "all"}
    y = torch.compile(model, backend=liger_ops.backend, dynamic=True, options=options)(ours, theirs)
    expected = model(x, weight)
    torch.testing.assert_close(y, expected)
    dy = torch.randn(2, 3, 8)
    torch.testing.assert_close(
        torch.autograd.grad(y, (ours, theirs), dy), torch.autograd.grad(expected, (x, weight), dy)
    )
