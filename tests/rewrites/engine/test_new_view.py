"""A view that a new PyTorch may bring is spelled once, in `canonical`, and every reader sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from liger_ops.rewrites.attention.grouped_attention import HEADS, repeated
from liger_ops.rewrites.attention.mask.bounds import UNKNOWN, MaskBounds
from liger_ops.rewrites.attention.mask.evaluate import IndexFunctions
from liger_ops.rewrites.attention.mask.proof import departure
from liger_ops.rewrites.attention.unfused_scores import per_head_numbers
from liger_ops.rewrites.engine.canonical import call, value
from liger_ops.rewrites.engine.insertion import Refused
from liger_ops.rewrites.engine.maps.algebra import Unknown
from liger_ops.rewrites.engine.maps.index_maps import index_map
from liger_ops.rewrites.layers.rope.elements import Elements
from liger_ops.rewrites.layers.rope.rotation import is_repeatable
from liger_ops.rewrites.losses.losses import start_of_path
from liger_ops.rewrites.losses.token_terms import TermReader


@torch.compiler.allow_in_graph
def turned(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).clone()


@torch.compiler.allow_in_graph
def joined(x: Tensor) -> Tensor:
    return x.flatten(0, -2).clone()


@pytest.fixture
def spelled() -> Iterator[None]:
    call.spelled(turned)(lambda x: call.Call("transpose", (x, (-2, -1))))
    call.spelled(joined)(lambda x: call.Call("view", (x, (-1, value(x).shape[-1]))))
    yield
    del call.FUNCTIONS[turned], call.FUNCTIONS[joined]


def last_node(program: Callable[..., Tensor], *inputs: Any) -> Any:
    found = []

    def backend(module: fx.GraphModule, inputs: object) -> Callable[..., object]:
        (output,) = module.graph.find_nodes(op="output")
        found.append(output.args[0][0])
        return module.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend)(*inputs)
    return found[0]


def mask(size: int) -> Tensor:
    return turned(torch.arange(size)[:, None] <= torch.arange(size))


def bias(size: int) -> Tensor:
    return turned(torch.zeros(size, size).masked_fill(mask(size), -1.0))


def heads(x: Tensor) -> Tensor:
    return turned(turned(x)[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2))


def column(x: Tensor) -> Tensor:
    return turned(x.view(1, -1, 1, 1).expand(2, -1, 5, 1).mT)


def reads_a_mask(size: int) -> bool:
    try:
        return departure(IndexFunctions().value(last_node(mask, size)), (size, size)) is None
    except Unknown:
        return False


def reads_a_loss() -> bool:
    logits = last_node(lambda x: turned(x.exp()), torch.ones(2, 3, 4))
    try:
        return bool(start_of_path(logits, torch.ones(2, 4)).nodes)
    except Refused:
        return False


def is_log_prob() -> bool:
    def program(x: Tensor) -> Tensor:
        rows = joined(F.log_softmax(x, -1))
        return rows.gather(-1, torch.zeros(6, 1, dtype=torch.int64))

    term = TermReader().read(last_node(program, torch.ones(2, 3, 4)))
    return term is not None and term.kind == "log_prob"


def turned_of(*sizes: int) -> Any:
    return last_node(lambda x: turned(x), torch.ones(sizes))


def step_of_a_rotation() -> Any:
    node = turned_of(5, 2, 3)
    return Elements(node).step(node, 2)


READERS: dict[str, Callable[[], Any]] = {
    "index_map": lambda: index_map(turned_of(2, 3)),
    "mask": lambda: reads_a_mask(4),
    "bounds": lambda: MaskBounds().of(last_node(bias, 4)) != UNKNOWN,
    "grouped heads": lambda: repeated(last_node(heads, torch.ones(2, 3, 4, 5)), HEADS),
    "sinks": lambda: per_head_numbers(last_node(column, torch.ones(3)))[0],
    "elements": step_of_a_rotation,
    "tables": lambda: is_repeatable(turned_of(2, 3)),
    "loss": reads_a_loss,
    "terms": is_log_prob,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_knows_no_view_without_a_spelling(reader):
    assert not READERS[reader]()


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_sees_a_new_spelling(reader, spelled):
    assert READERS[reader]()
