"""The classes that override methods of single modules."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from liger_ops.fusion import classes


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x

    def other(self) -> str:
        return "base"


class Stateful(Scale):
    """A class with its own methods for its pickled state."""

    def __reduce__(self) -> Any:
        return Stateful.with_factor, (type(self), self.factor.item())

    @staticmethod
    def with_factor(cls: type, factor: float) -> Stateful:
        module = cls()
        with torch.no_grad():
            module.factor.fill_(factor)
        return module


@pytest.fixture(autouse=True)
def kinds() -> Iterator[None]:
    @classes.kind("added")
    def added(base: Any, facts: float) -> dict[str, Callable[..., Any]]:
        return {"forward": lambda self, x: base.forward(self, x) + facts}

    @classes.kind("named")
    def named(base: Any, facts: str) -> dict[str, Callable[..., Any]]:
        return {"other": lambda self: facts + base.other(self)}

    yield
    for name in ("added", "named"):
        classes.KINDS.pop(name)


@pytest.mark.parametrize("cls", [Scale, Stateful])
def test_kinds_are_stacked_and_copied(cls: type[Scale]) -> None:
    module, untouched = cls(), cls()
    with torch.no_grad():
        module.factor.fill_(3.0)
    classes.override(module, "added", 1.0)
    classes.override(module, "named", "my ")
    for copied in (
        module,
        copy.deepcopy(module),
        copy.copy(module),
        *(pickle.loads(pickle.dumps(module, protocol)) for protocol in (2, 4)),
        copy.deepcopy(nn.ModuleList([module]))[0],
    ):
        assert type(copied) is type(module) is not cls
        assert isinstance(copied, cls)
        assert copied.other() == "my base"
        assert copied(torch.tensor(2.0)).item() == 7.0
        assert classes.overrides(copied) == {"added": 1.0, "named": "my "}
    names = ("__name__", "__qualname__", "__module__", "__doc__")
    assert [getattr(type(module), name) for name in names] == [getattr(cls, name) for name in names]
    assert type(untouched) is cls and not classes.overrides(untouched)
    assert classes.restore(nn.ModuleList([module, untouched])) == 2
    assert type(module) is cls
    assert module(torch.tensor(2.0)).item() == 6.0


def test_equal_facts_make_one_class() -> None:
    modules = [Scale() for _ in range(3)]
    for module, facts in zip(modules, (1.0, 1.0, 2.0), strict=True):
        classes.override(module, "added", facts)
    assert type(modules[0]) is type(modules[1]) is not type(modules[2])


def test_classes_go_with_their_modules() -> None:
    module = Scale()
    classes.override(module, "added", 5.0)
    made = weakref.ref(type(module))
    del module
    gc.collect()
    assert made() is None
