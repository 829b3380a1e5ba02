"""The context of `liger_ops.invariant`: what it replaces, and what it restores."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

import liger_ops
from liger_ops import invariant_mode
from liger_ops.invariance import context, rows

DOCUMENT = Path(__file__).parents[2] / "docs/invariant.md"


def table() -> str:
    """Return the table of operators in docs/invariant.md."""
    rows = ["| operators | |", "|---|---|"]
    for names, function in context.REPLACED.items():
        listed = ", ".join(f"`{name}`" for name in names)
        rows.append(f"| {listed} | {inspect.getdoc(function).splitlines()[0]} |")  # type: ignore[union-attr]
    return "\n".join(rows)


def test_the_document_lists_what_is_replaced() -> None:
    assert table() in DOCUMENT.read_text()


def recorded(function: object) -> list[str]:
    """Return the names of the functions of rows that a call computes."""
    names: list[str] = []
    rows.recorders.append(lambda name, columns: names.append(name))
    try:
        function()  # type: ignore[operator]
    finally:
        rows.recorders.pop()
    return names


X = torch.randn(5, 8)


def product() -> Tensor:
    return X @ X.t()


def test_contexts_nest_and_restore() -> None:
    assert recorded(product) == []
    with liger_ops.invariant():
        with liger_ops.invariant():
            assert recorded(product) == ["a matrix product"]
        assert recorded(product) == ["a matrix product"]
    assert recorded(product) == []
    assert not invariant_mode.is_invariant()


def test_an_error_restores() -> None:
    with pytest.raises(KeyError), liger_ops.invariant():
        raise KeyError
    assert recorded(product) == []


def test_every_thread_is_included() -> None:
    names: list[str] = []
    with liger_ops.invariant():
        thread = threading.Thread(target=lambda: names.extend(recorded(product)))
        thread.start()
        thread.join()
    assert names == ["a matrix product"]


def test_compiled_functions_are_compiled_anew_and_restored() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x @ x.t(), backend=backend)
    compiled(X)
    for _ in range(2):
        with liger_ops.invariant():
            assert recorded(lambda: compiled(X)) == ["a matrix product"]
    assert recorded(lambda: compiled(X)) == []
    assert len(graphs) == 1


def test_code_from_before_the_context_is_not_used_in_another_stance() -> None:
    compiled = torch.compile(lambda x: x @ x.t(), backend="eager")
    compiled(X)
    with liger_ops.invariant(), torch.compiler.set_stance("eager_on_recompile"):
        assert recorded(lambda: compiled(X)) == ["a matrix product"]


def test_enable_opens_a_context_until_it_is_undone() -> None:
    with liger_ops.enable(invariant=True):
        assert recorded(product) == ["a matrix product"]
    assert recorded(product) == []
    liger_ops.enable(invariant=True)
    liger_ops.enable()
    liger_ops.disable()
    assert invariant_mode.is_invariant()
    liger_ops.disable()
    assert not invariant_mode.is_invariant()
    with pytest.raises(TypeError, match="enable: invariant must be a bool"):
        liger_ops.enable(invariant=1)  # type: ignore[arg-type]


def test_out_and_in_place_forms_write_where_they_should() -> None:
    out, added = torch.empty(0), torch.ones(5, 5)
    with liger_ops.invariant():
        assert torch.mm(X, X.t(), out=out) is out
        assert added.addmm_(X, X.t(), beta=2) is added
        torch.testing.assert_close(torch.exp(X, out=torch.empty(5, 8)), X.exp())
    torch.testing.assert_close(out, X @ X.t())
    torch.testing.assert_close(added, 2 + X @ X.t())


@pytest.mark.parametrize("rows", [1, 64, 100])
def test_results_are_computed_in_the_memory_of_out(rows: int) -> None:
    """64 rows are one block on a CPU, which needs no memory beside `out`."""
    x, weight, out = torch.randn(rows, 96), torch.randn(96, 32), torch.full((rows, 32), torch.nan)
    with liger_ops.invariant():
        expected = x @ weight
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.mm(x, weight, out=out)
        added = torch.addmm(out, x, weight)
        torch.addmm(out, x, weight, out=out)
    assert torch.equal(out, added)
    torch.testing.assert_close(out, 2 * expected)
    copies = sum(event.name == "aten::copy_" for event in profile.events())
    assert copies == 0 if rows == 64 else copies > 0


def test_dtypes_are_promoted_as_they_are() -> None:
    for x in (X, X.double(), X.bfloat16(), torch.arange(4), torch.ones(3, dtype=torch.bool)):
        for function in (
            lambda x: x * 0.1, lambda x: 2 - x, lambda x: x + torch.tensor(0.5).double(),
            lambda x: x / 3, lambda x: x.remainder(2), lambda x: x.sum(0), lambda x: x > 0.5,
        ):  # fmt: skip
            try:
                expected = function(x)
            except RuntimeError:
                continue
            with liger_ops.invariant():
                torch.testing.assert_close(function(x), expected)


def test_empty_tensors_and_sums_over_rows_are_left_alone() -> None:
    empty = torch.randn(0, 8)
    with liger_ops.invariant():
        assert recorded(lambda: empty @ X.t()) == []
        assert recorded(lambda: X.t() @ X) == []
        assert recorded(lambda: X.sum(0)) == []
        assert recorded(lambda: X.sum()) == []
        assert (empty @ X.t()).shape == (0, 5)
    torch.testing.assert_close(X.t() @ X, X.t().contiguous() @ X)


def test_the_random_numbers_of_a_program_are_the_same() -> None:
    layer = torch.nn.Linear(8, 3)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with liger_ops.invariant():
        layer(X)
        assert torch.equal(torch.rand(3), expected)
