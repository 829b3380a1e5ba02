"""One canonical form, and one name, for the spellings that versions of Dynamo give an operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from liger_ops.rewrites.engine.canonical import IDENTITY, canonical, operation
from liger_ops.rewrites.engine.pattern import Pattern
from liger_ops.rewrites.engine.report import Report
from liger_ops.rewrites.engine.rewrite import Search

ATEN = torch.ops.aten
# The operators of the properties of Tensor that return a view, and of two methods.
OPERATORS = {
    "T": ATEN.numpy_T, "mT": ATEN.mT, "H": ATEN.matrix_H, "mH": ATEN.mH, "real": ATEN.real,
    "t": ATEN.t, "adjoint": ATEN.adjoint,
}  # fmt: skip
SPELLINGS = {
    "Tensor": lambda graph, name, x: (
        graph.call_method(name, (x,))
        if callable(getattr(Tensor, name))
        else graph.call_function(getattr, (x, name))
    ),
    "packet": lambda graph, name, x: graph.call_function(OPERATORS[name], (x,)),
    "overload": lambda graph, name, x: graph.call_function(OPERATORS[name].default, (x,)),
}


def node_of(spelling: str, name: str, x: Tensor) -> fx.Node:
    graph = fx.Graph()
    given = graph.placeholder("x")
    given.meta["example_value"] = x
    return SPELLINGS[spelling](graph, name, given)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_property_and_its_operator(name, spelling):
    x = torch.randn(2, 3)
    expected = getattr(x, name)
    expected = expected() if callable(expected) else expected
    torch.testing.assert_close(OPERATORS[name](x), expected)
    node = node_of(spelling, name, x)
    (given,) = node.all_input_nodes
    form = (IDENTITY, (given,)) if name == "real" else ("transpose", (given, (-2, -1)))
    assert canonical(node)[:2] == form and operation(node) == name


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("name", "x"),
    [
        ("T", torch.ones(2, 3, 4)),
        ("t", torch.ones(2)),
        ("H", torch.ones(2, 3, dtype=torch.complex64)),
        ("mH", torch.ones(2, 3, dtype=torch.complex64)),
        ("real", torch.ones(2, 3, dtype=torch.complex64)),
    ],
)
def test_what_is_no_transpose_of_a_matrix(name, x, spelling):
    assert canonical(node_of(spelling, name, x)) is None


PROPERTIES = [name for name in OPERATORS if not callable(getattr(Tensor, name))]


@pytest.mark.parametrize("name", PROPERTIES)
def test_what_dynamo_writes_for_a_property(name):
    found: list[Any] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        found.extend(operation(node) for node in module.graph.nodes if node.op.startswith("call"))
        return module.forward

    torch.compile(lambda x: getattr(x + 1, name), backend=backend)(torch.randn(2, 3))
    assert found == ["add", name]


def test_a_graph_that_a_rewrite_changed_is_read_again() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    gate = graph.call_function(torch.sigmoid, (x,))
    silu = graph.call_function(torch.mul, (x, gate))
    total = graph.call_function(torch.add, (silu, 1))
    for node in graph.nodes:
        node.meta["example_value"] = torch.empty(3)
    patterns = [
        (Pattern(lambda x: x + 1, x=(3,)), "add"),
        (Pattern(lambda x: torch.nn.functional.silu(x), x=(3,)), "silu"),
    ]
    found = []
    for match, name in Search(graph, Report(), "test").matches(patterns):
        found.append(name)
        if match.root is total:
            silu.args = (x, x)
    assert found == ["add"]
