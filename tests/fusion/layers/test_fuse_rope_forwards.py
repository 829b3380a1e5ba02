"""Forwards that call a function which is rope: `fuse` copies them, and changes nothing else."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs import Recorder, liger_ops_of
from liger_ops import fuse
from rotating_modules import (
    B,
    D,
    H,
    K,
    Rotating,
    S,
    interleaved,
    ops_of,
    rotate,
    set_rotate,
    tensors,
)


def doubling(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, factor: float = 2.0, **kwargs: Any) -> Any:
        q, k = forward(self, *args, **kwargs)
        return q * factor, k

    return wrapper


class Hidden:
    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward


def keeping(forward: Callable[..., Any]) -> Callable[..., Any]:
    hidden = Hidden(forward)

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any) -> Any:
        return hidden.forward(self, *args)

    return wrapper


class Decorated(Rotating):
    @doubling
    @doubling
    def forward(self, q: Tensor, k: Tensor, *tables: Tensor, unused: int = 3) -> Any:
        return rotate(q, k, *tables)


class Base(nn.Module):
    def forward(self, *args: Tensor) -> Any:
        return rotate(*args)


class CallsSuper(Base):
    def forward(self, *args: Tensor) -> Any:
        q, k = rotate(*args)
        return super().forward(q, k, *args[2:])


def test_decorated_forward() -> None:
    module = Decorated()
    signature = inspect.signature(module.forward)
    assert len(fuse(module)) == 1
    assert inspect.signature(module.forward) == signature
    args = tensors()
    assert ops_of(module, args) == ["rope"]
    torch.testing.assert_close(module(*args), Decorated()(*args))
    torch.testing.assert_close(module(*args, factor=0.5), Decorated()(*args, factor=0.5))


def test_forward_that_calls_its_base_class() -> None:
    """Only the class's own forward is changed to call the op."""
    module = CallsSuper()
    assert len(fuse(module)) == 1
    args = tensors()
    assert ops_of(module, args) == ["rope"]
    torch.testing.assert_close(module(*args), CallsSuper()(*args))


def test_forwards_that_cannot_be_made_again_are_left() -> None:
    class Kept(Rotating):
        @keeping
        def forward(self, *args: Tensor) -> Any:
            return rotate(*args)

    class Attribute(Rotating):
        def forward(self, *args: Tensor) -> Any:
            return rotate(*args) if self.rotate is None else self.rotate(*args)

    own = Rotating()
    own.forward = own.forward  # type: ignore[method-assign]
    reasons = [fuse(module).left[0].reason for module in (Kept(), Attribute(), own)]
    assert reasons[0].startswith("its forward is wrapped by")
    assert reasons[0].endswith("Kept.forward, which cannot be made again")
    assert reasons[1] == "its forward uses the name rotate for more than a call"
    assert reasons[2] == "the instance has a forward of its own"


added = 0.0


class Adding(nn.Module):
    def forward(self, *args: Tensor) -> Any:
        q, k = rotate(*args)
        return q + added, k


def test_later_changes_of_globals_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Adding()
    fuse(module)
    args = tensors()
    before = module(*args)
    monkeypatch.setattr(sys.modules[__name__], "added", 1.0)
    torch.testing.assert_close(module(*args)[0], before[0] + 1)


def test_another_function_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two modules, each fused with the function that its forward called at the time. The first
    runs its own code, which calls the other function, afterwards."""
    one = Rotating()
    fuse(one)
    set_rotate(monkeypatch, interleaved)
    two = Rotating()
    fuse(two)
    args = tensors()
    assert (ops_of(one, args), ops_of(two, args)) == ([], ["rope"])
    torch.testing.assert_close(one(*args), interleaved(*args))
    torch.testing.assert_close(two(*args), interleaved(*args))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("cls", [Rotating, Decorated])
def test_compiles_whole(cls: type[nn.Module], dynamic: bool) -> None:
    module = cls()
    fuse(module)
    torch._dynamo.reset()
    recorder = Recorder()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend=recorder.backend())
    for count in (S, S + 3) if dynamic else (S,):
        q, k, cos, sin = (torch.randn(B, n, count, D) for n in (H, K, 1, 1))
        args = q.requires_grad_(), k.requires_grad_(), cos[:, 0], sin[:, 0]
        y = compiled(*args)
        torch.testing.assert_close(y, module(*args))
        (y[0].sum() + y[1].sum()).backward()
    assert liger_ops_of(recorder.forwards) == {"rope": 1}
    assert liger_ops_of(recorder.backwards) == {"rope_backward": 1}
