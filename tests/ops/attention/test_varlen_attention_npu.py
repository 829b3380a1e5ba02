"""varlen_attention on an NPU: torch_npu's operator, of which a stand-in checks the arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import liger_ops
import simulated_npu
from liger_ops.lowering.npu.attention import varlen_attention as on_npu
from liger_ops.ops.attention.packed_documents import DOCUMENT_BOUNDS
from op_table import OPS
from op_under_test import DEVICE, INF
from simulated_npu import to_cpu, to_npu
from torch_npu_stand_in import FusionAttention
from varlen_calls import call_of, gradients, ints, run

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="of the stand-in for torch_npu")

OP = OPS["varlen_attention_forward"]
INPUTS = ("query", "key", "value", "sinks")
CALLED = ["torch_npu.npu_fusion_attention"], ["torch_npu.npu_fusion_attention_grad"]
# The tokens, the documents, and the number of keys of each.
Batch = tuple[int, tuple[int, ...], tuple[int, ...] | None]
BATCHES: dict[str, Batch] = {
    "right": (20, (0, 5, 10, 15, 20), (5, 3, 1, 3)),
    "left": (20, (0, 0, 5, 7, 10, 14, 15, 16, 20), (0, 5, 0, 3, 0, 1, 0, 4)),
    "packed": (16, (1, 4, 4, 9, 14, 14), None),
    "one": (9, (0, 9), None),
    "some without keys": (12, (0, 4, 8, 12), (0, 4, 0)),
    "none with keys": (5, (0, 5), (0,)),
}
# For each window, how many calls the batch "right" takes: documents with other padding that a
# window reaches are calls of their own.
WINDOWS = {(-1, 0): 1, (-1, -1): 1, (2, 0): 2, (0, 1): 1, (40, 3): 3, (-1, 2): 3}


def batch_of(name: str, E: int = 6, sinks: bool = True) -> Any:
    """Return a call with one of BATCHES: 4 heads, of which two share keys. A mask hides what is
    behind the last key of a document, as where the lengths were those of the mask."""
    T, documents, lengths = BATCHES[name]
    call = call_of(T, ints(*documents), 9, heads=4, E=E, dtype=torch.bfloat16)
    shown = torch.ones(T, dtype=torch.bool)
    for start, end, keys in zip(documents, documents[1:], lengths or (), strict=False):
        shown[start + keys : end] = False
    return call._replace(
        lengths=None if lengths is None else ints(*lengths),
        key_mask=shown,
        # The first takes a part of the weight, and the second none.
        sinks=torch.tensor([0.5, -INF, 0.0, 2.0]) if sinks else None,
    )


def on_device(call: Any, dy: Tensor) -> tuple[list[Tensor], list[str]]:
    """Return y and the gradients that dispatch computes on the simulated device, and what ran."""
    with simulated_npu.visible():
        given = {
            name: to_npu(x.clone()) if isinstance(x, Tensor) and name != "bounds" else x
            for name, x in call._asdict().items()
        }
        leaves = [given[name].requires_grad_() for name in INPUTS if given[name] is not None]
        y = liger_ops.varlen_attention(**given)
        found = (y, *torch.autograd.grad(y, leaves, to_npu(dy)))
        return [to_cpu(x.detach()) for x in found], [*simulated_npu.launched]


def assert_right(found: list[Tensor], call: Any, dy: Tensor) -> None:
    """Compare y and the gradients with the definition in float32, from the same numbers."""
    given = {name: getattr(call, name) for name in INPUTS}
    call = call._replace(**{name: x.float() for name, x in given.items() if x is not None})
    expected = [run("definition", call)[0], *gradients("definition", call, dy.float())]
    for a, b in zip(found, (x for x in expected if x is not None), strict=True):
        # Operands of products are rounded to 8 bits, and terms as large as the largest cancel.
        bound = 0.02 * max(1.0, float(b.abs().max()))
        torch.testing.assert_close(a.float(), b, rtol=0.03, atol=bound)


def drawn_like(y: Tensor) -> Tensor:
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", BATCHES)
def test_every_batch_runs_the_operator(name: str, window: tuple[int, int]) -> None:
    """With padding on either side, gaps, empty documents, shared heads, two widths, and sinks."""
    left, right = window
    call = batch_of(name, E=6 if left < 0 else 3, sinks=name != "one")
    call = call._replace(window_left=left, window_right=right)
    dy = drawn_like(run("definition", call)[0])
    found, ran = on_device(call, dy)
    times = {"right": WINDOWS[window], "none with keys": 0}.get(name, 1)
    assert ran == CALLED[0] * times + CALLED[1] * times
    assert_right(found, call, dy)


@pytest.mark.parametrize("name", BATCHES)
def test_bounds_in_their_long_form_save_the_look(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = batch_of(name)._replace(window_left=2)
    dy = drawn_like(run("definition", call)[0])
    expected, ran = on_device(call, dy)
    bounds = DOCUMENT_BOUNDS(call.cu_seqlens, call.lengths, call.key_mask)
    T, documents, lengths = BATCHES[name]
    sizes = [end - start for start, end in zip(documents, documents[1:], strict=False)]
    filled = [i for i, size in enumerate(sizes) if size]
    assert bounds.tolist() == [filled[-1] + 1, max(sizes), 0, *documents, *(lengths or sizes)]
    monkeypatch.setattr(on_npu, "document_bounds", None)
    found, ran_now = on_device(call._replace(bounds=bounds), dy)
    assert ran_now == ran and all(map(torch.equal, found, expected))
    # The short form says nothing of each document.
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        on_device(call._replace(bounds=bounds[:2]), dy)


def test_the_bounds_of_no_documents() -> None:
    assert DOCUMENT_BOUNDS(ints(2), None, torch.ones(3).bool()).tolist() == [0, 0, 0, 2]
    assert DOCUMENT_BOUNDS(ints(2, 2), None, None).tolist() == [0, 0, 0, 2, 2, 0]


@pytest.mark.parametrize(("hidden", "hides"), [(0, 0), (1, 1), (3, 1), (4, 0), (5, 1), (8, 0)])
def test_what_a_mask_hides_of_documents(hidden: int, hides: int) -> None:
    """Tokens of no document and those that are no keys do not count."""
    mask = torch.ones(9, dtype=torch.bool)
    mask[hidden] = False
    bounds = DOCUMENT_BOUNDS(ints(1, 5, 8), ints(3, 9), mask)
    assert bounds.tolist() == [2, 4, hides, 1, 5, 8, 3, 3]
    opcheck = torch.library.opcheck
    opcheck(DOCUMENT_BOUNDS, (ints(1, 5, 8), ints(3, 9), mask))


@pytest.mark.parametrize("backend", (None, "aot_eager"))
def test_compiled(backend: str | None) -> None:
    plain = {"has_lengths": False, "has_key_mask": False, "softcap": None}
    case = OP.sample(torch.bfloat16, rows=9, width=4, count=3, **plain)
    arguments = OP.forward_args(case, OP.tensors(case))
    call = OP.overload()
    if backend:
        torch._dynamo.reset()
        call = torch.compile(lambda *a: OP.overload()(*a), backend=backend, fullgraph=True)
    places = [i for i, x in enumerate(arguments) if isinstance(x, Tensor)]
    with simulated_npu.visible():
        given = [to_npu(x.clone()) if i in places else x for i, x in enumerate(arguments)]
        leaves = [given[i].requires_grad_() for i in places if OP.has_gradient(i)]
        y = call(*given)[0]
        assert simulated_npu.launched == CALLED[0]
        dy = torch.randn(y.shape, dtype=y.dtype)
        found = torch.autograd.grad(y, leaves, to_npu(dy))
        assert simulated_npu.launched[1:] == CALLED[1]
        found = [to_cpu(x) for x in (y, *found)]
    given = [x.clone() if i in places else x for i, x in enumerate(arguments)]
    leaves = [given[i].requires_grad_() for i in places if OP.has_gradient(i)]
    y = OP.definition(*given)[0]
    for a, b in zip(found, (y, *torch.autograd.grad(y, leaves, dy)), strict=True):
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)


HOLE = torch.arange(8) != 4


@pytest.mark.parametrize(
    "more", ({"softcap": 1.0}, {"key_mask": HOLE}, {"dtype": torch.float32}, {"heads": 258})
)
def test_the_definition_of_what_the_operator_does_not_take(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given a document at a time, so that it holds the scores of one."""
    largest = 0
    definition = on_npu._by_definition

    def noted(name: str, call: Any) -> Any:
        nonlocal largest
        largest = max(largest, len(call.query))
        return definition(name, call)

    monkeypatch.setattr(on_npu, "_by_definition", noted)
    call = call_of(8, ints(1, 3, 3, 7), 4, **{"dtype": torch.bfloat16, **more})
    call = call._replace(lengths=ints(1, 0, 3), sinks=torch.randn(call.query.shape[1]))
    y, lse = run("npu", call)
    dy = drawn_like(y)
    assert_right([y, *gradients("npu", call, dy)], call, dy)
    torch.testing.assert_close(lse, run("definition", call)[1])
    assert largest == 4


def test_several_calls_for_many_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens between documents are in none of them, nor is a document without tokens."""
    monkeypatch.setattr(on_npu, "MOST_DOCUMENTS", 2)
    call = call_of(14, ints(1, 4, 6, 6, 6, 9, 12), 4, dtype=torch.bfloat16, window_right=-1)
    calls = on_npu.operator_calls(call, on_npu.documents_of(call))
    assert [one.queries for one in calls] == [slice(1, 6), slice(6, 12)]
    dy = drawn_like(call.query)
    found = [run("npu", call)[0], *gradients("npu", call, dy)[:3]]
    assert_right(found, call, dy)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"actual_seq_qlen": [3, 6], "actual_seq_kvlen": [3, 3]}, "hidden whole"),
        ({"actual_seq_qlen": [1, 6], "actual_seq_kvlen": [1, 3], "sparse_mode": 3}, "hidden whole"),
        ({"actual_seq_qlen": torch.tensor([6]), "actual_seq_kvlen": [3]}, "on the host"),
        ({"actual_seq_qlen": [5], "actual_seq_kvlen": [3]}, ""),
        ({"actual_seq_qlen": [2, 6], "actual_seq_kvlen": [3]}, "as many documents"),
        ({"softmax_layout": ""}, "of another order"),
        ({"atten_mask": torch.ones(6, 3).bool()}, "the mask of"),
        ({"next_tockens": 0}, "no effect"),
    ],
)
def test_the_stand_in_refuses_what_the_documentation_does(given: dict[str, Any], text: str) -> None:
    taken = {
        "atten_mask": torch.ones(2048, 2048).bool().triu(1), "sparse_mode": 2,
        "actual_seq_qlen": [6], "actual_seq_kvlen": [3], "softmax_layout": "TND",
    }  # fmt: skip
    tensors = (torch.zeros(n, 2, 4, dtype=torch.bfloat16) for n in (6, 3, 3))
    operands = (*tensors, 2, "TND", 0.5)
    assert len([*FusionAttention(*operands, **taken).documents()]) == 1
    with pytest.raises(AssertionError, match=text):
        [*FusionAttention(*operands, **{**taken, **given}).documents()]
