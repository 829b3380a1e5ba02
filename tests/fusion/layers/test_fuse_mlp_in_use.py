"""A module with fused gated activation in use: its children, hooks, adapters and class."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch.nn.utils import parametrizations

from gated_modules import HIDDEN, Gated, GateSecond, UpFirst, adapted, results
from liger_ops import fuse, unfuse


def test_only_the_forward_of_the_module_changes() -> None:
    module, other = Gated(), Gated()
    forward, state, text = Gated.forward, module.state_dict(), repr(module)
    children = dict(module.named_children())
    assert len(fuse(module)) == 1
    assert isinstance(module, Gated)
    assert type(other) is Gated and Gated.forward is forward
    assert type(module).__name__ == "Gated" and repr(module) == text
    assert inspect.signature(module.forward) == inspect.signature(other.forward)
    assert dict(module.named_children()) == children
    assert (
        all(value is state[name] for name, value in module.state_dict(keep_vars=True).items())
        or module.state_dict().keys() == state.keys()
    )
    x = torch.randn(2, HIDDEN)
    assert torch.equal(module(hidden=x), module(x))
    with pytest.raises(TypeError):
        module(x=x)
    assert unfuse(module) == 1
    assert type(module) is Gated


def test_children_are_called_in_their_order() -> None:
    """The order determines the random numbers that they draw, such as for an adapter's dropout."""
    for cls in (Gated, UpFirst, GateSecond):
        module = cls()
        orders: list[list[str]] = []
        for name, child in module.named_children():
            child.register_forward_hook(
                lambda *_, name=name, orders=orders: orders[-1].append(name)
            )
        module.activation._forward_hooks.clear()
        for change in (unfuse, fuse):
            change(module)
            orders.append([])
            module(torch.randn(2, HIDDEN))
        assert orders[0] == orders[1]
        assert len(orders[0]) == 3


@pytest.mark.parametrize("before", [False, True])
def test_wrapped_projections(before: bool) -> None:
    """Adapters added before fuse or after it are called, and trained."""
    module = Gated()
    if before:
        adapted(module)
    assert len(fuse(module)) == 1
    if not before:
        adapted(module)
    original = copy.deepcopy(module)
    assert unfuse(original) == 1
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(results(module, x), results(original, x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_hooks_of_the_module_and_its_projections_run() -> None:
    module = Gated()
    calls = []
    for hooked_module in (module, module.a, module.out):
        hooked_module.register_forward_hook(lambda module, args, y: calls.append(module))
    assert len(fuse(module)) == 1
    module(torch.randn(2, HIDDEN))
    assert calls == [module.a, module.out, module]


def test_parametrized_projection() -> None:
    module = Gated()
    parametrizations.weight_norm(module.a)
    original = copy.deepcopy(module)
    assert len(fuse(module)) == 1
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(module(x), original(x))
