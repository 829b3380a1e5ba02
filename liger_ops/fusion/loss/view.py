"""A view of a model for one call of its forward: the model with another head.

The model's own forward runs in full. Its `self` is not the model but a view of it, made for this
one call: every attribute is the model's, except the head. The state of the head's calls thus lives
as long as the call, and nothing is written to the model: concurrent calls, recomputed calls and
calls that raise do not interfere. torch.compile traces a view like any other object.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from .. import classes


def view_class(base: type) -> type[View]:
    """Make the class of views for models of a class."""
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        # FSDP2's __new__ would make an instance of the class that it wraps.
        "__new__": _new,
        "_liger_ops_defaults": tuple(name for name in dir(base) if _is_default(base, name)),
        "_liger_ops_methods": tuple(name for name in dir(base) if _is_method(base, name)),
    }
    return type(base.__name__, (View, base), namespace)


def _new(cls: type, *args: Any) -> Any:
    return object.__new__(cls)


def _is_default(base: type, name: str) -> bool:
    """Whether a class's attribute is a default that its instances may replace by a value."""
    attribute = inspect.getattr_static(base, name)
    return not name.startswith("__") and (
        isinstance(attribute, type) or not hasattr(attribute, "__get__")
    )


def _is_method(base: type, name: str) -> bool:
    """Whether an attribute is a method of a model's class, which an instance may replace."""
    if name.startswith("__") or name == "forward" or hasattr(nn.Module, name):
        return False
    return inspect.isroutine(getattr(base, name, None))


def prepare(model: nn.Module, path: str) -> None:
    """Make the classes of the views of the modules on the path to a head.

    They are made when a model is fused, because torch.compile cannot trace the making of a class.
    """
    for name in path.split(".")[:-1]:
        model = getattr(model, name)
        if type(model) not in _VIEWS:
            _VIEWS[type(model)] = view_class(_without_its_loss(type(model)))


_VIEWS: dict[type, type[View]] = {}


def _without_its_loss(cls: type) -> type:
    """The class without an override of its loss: the one under it if the model is being fused."""
    base, kind, _ = vars(cls).get(classes.OVERRIDDEN, (cls, "", None))
    return base if kind == "loss" else cls


def view_of(model: nn.Module, path: str, call: Any, view: type[View] | None = None) -> View:
    """A view of a model with `call` for its head, and with views of the modules on its path."""
    name, _, rest = path.partition(".")
    held = call
    if rest:
        child = getattr(model, name)
        if type(child) not in _VIEWS:
            prepare(model, path)
        held = view_of(child, rest, call, _VIEWS[type(child)])
    return (view or view_class(type(model)))(model, name, held)


class View:
    """A model with one child replaced, for one call of its forward.

    It is an instance of the model's class, so that `super()` works, but holds nothing: attributes
    that the class does not have are taken from the model. The child is the head, or a view of the
    module that contains it.
    """

    # Attributes of the class that the model may replace by its own.
    _liger_ops_defaults: tuple[str, ...] = ()
    _liger_ops_methods: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, name: str, child: Any) -> None:
        object.__setattr__(self, "_liger_ops_view", (model, name, child))
        for name in self._liger_ops_defaults:
            object.__setattr__(self, name, getattr(model, name))
        own = vars(model)
        for name in self._liger_ops_methods:
            if name in own:
                object.__setattr__(self, name, own[name])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The viewed module has no hooks, because a model with any is not fused.
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        model, child_name, child = self._liger_ops_view
        return child if name == child_name else getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._liger_ops_view[0], name, value)
        if name in self._liger_ops_defaults:
            object.__setattr__(self, name, value)
