"""An index map says of each element of a view which element of its source it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from index_programs import value_at
from liger_ops.rewrites.engine.maps.index_maps import CASTS, VIEWS, IndexMap, index_maps

NEG = torch.neg


def check_map(program, x) -> None:
    """Compare each element of a view with the element of x at its place."""
    found: list[IndexMap] = []

    def backend(module: fx.GraphModule, inputs: object) -> Callable[..., object]:
        source, _ = module.graph.find_nodes(op="call_function", target=NEG)
        (output,) = module.graph.find_nodes(op="output")
        (view,) = output.args[0][0].args
        found.extend(index_maps(view, VIEWS | CASTS))
        assert found[-1].source is source and found[-1].nodes[0] is view
        return module.forward

    torch._dynamo.reset()
    # Dynamo leaves out of the graph a view of an input that is returned.
    torch.compile(lambda x: NEG(program(NEG(x))), backend=backend)(-x)
    result = program(x)
    for at in itertools.product(*map(range, result.shape)):
        place = tuple(int(value_at(found[-1].places[axis], at)) for axis in range(-x.dim(), 0))
        assert result[at] == x[place], (at, place)


VIEWS_OF_24 = {
    "transpose": lambda x: x.transpose(0, -1),
    "mT": lambda x: x.mT,
    "permute": lambda x: x.permute(1, 2, 0),
    "torch.permute": lambda x: torch.permute(x, (2, 0, 1)),
    "flatten": lambda x: x.flatten(1),
    "flatten all": torch.flatten,
    "unflatten": lambda x: x.unflatten(-1, (2, -1)),
    "split and merged": lambda x: x.view(6, 2, 2),
    "merged and split": lambda x: x.reshape(3, 8),
    "no common factor": lambda x: x.reshape(4, 6),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "None": lambda x: x[None, :, None],
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "squeeze of all": lambda x: x[:1, :, None].squeeze(),
    "squeeze of some": lambda x: x[:1, :, None].squeeze((0, 2)),
    "select": lambda x: x.select(1, 2),
    "negative index": lambda x: x[..., -1],
    "two indices": lambda x: x[1, :, -2],
    "slice": lambda x: x[:, 1:],
    "step": lambda x: x[..., 1::2],
    "from the end": lambda x: x[:, -2:],
    "two slices": lambda x: x[:1, :, 1:3],
    "narrow": lambda x: x.narrow(-1, 1, 2),
    "narrow from the end": lambda x: torch.narrow(x, 1, -2, 2),
    "chunk": lambda x: x.chunk(2, dim=-1)[1],
    "split": lambda x: torch.split(x, [1, 2], dim=1)[1],
    "unbind": lambda x: x.unflatten(-1, (2, 2)).unbind(-1)[1],
    "expand": lambda x: x[:, None].expand(2, 5, -1, 4),
    "expand_as": lambda x: x[:1].expand_as(x),
    "broadcast_to": lambda x: torch.broadcast_to(x, (3, *x.shape)),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "repeat with more dimensions": lambda x: x.repeat(2, 1, 2, 1),
    "tile": lambda x: x.tile(2),
    "repeat_interleave": lambda x: x.repeat_interleave(3, dim=1),
    "repeated heads": lambda x: x[:, :, None].expand(2, 3, 2, 4).reshape(2, 6, 4),
    "copies": lambda x: x.contiguous().clone().detach(),
    "casts": lambda x: x.double().to(torch.float16).long(),
}


@pytest.mark.parametrize("name", VIEWS_OF_24)
def test_the_map_of_a_view(name):
    check_map(VIEWS_OF_24[name], torch.arange(24.0).view(2, 3, 4))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(sorted(VIEWS_OF_24)), min_size=2, max_size=4))
def test_the_map_of_views_of_views(names):
    def program(x: Tensor) -> Tensor:
        for name in names:
            elements = VIEWS_OF_24[name](x).flatten()
            x = elements.repeat(-(-24 // len(elements)))[:24].view(2, 3, 4)
        return x

    check_map(program, torch.arange(24.0).view(2, 3, 4))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.view(torch.int32),
        lambda x: x[[1, 0]],
        lambda x: x[torch.tensor([1, 0])],
        lambda x: x.repeat_interleave(torch.tensor([1, 2]), dim=0),
        lambda x: x.sum(-1),
    ],
    ids=["bytes", "list", "tensor", "counts", "sum"],
)
def test_what_is_no_view(program):
    def backend(module: fx.GraphModule, inputs: object) -> Callable[..., object]:
        (output,) = module.graph.find_nodes(op="output")
        assert list(index_maps(output.args[0][0].args[0])) == []
        return module.forward

    torch._dynamo.reset()
    torch.compile(lambda x: NEG(program(NEG(x))), backend=backend)(torch.ones(2, 3, 4))
