"""Shared parts of the probes, which run copies of a model's code on the CPU to recognise it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from ..rewrites.engine.report import first_line as first_line

T = TypeVar("T")

DEVICE = torch.device("cpu")

MODULE_STATE = frozenset(vars(nn.Module()))

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class NotAnOp(Exception):
    """The code does not compute an op. The text is the reason, and says "it" for the module."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run the body on the CPU without gradients and autocast. It leaves no traces: no warnings, and
    unchanged random number generators.

    The context of a device slows down every call of PyTorch, so that it is entered only if the
    default device is another one.
    """
    is_default = torch.empty(0).device == DEVICE
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.autocast(DEVICE.type, enabled=False),
        torch.no_grad(),
        nullcontext() if is_default else DEVICE,
    ):
        warnings.simplefilter("ignore")
        yield


class Probes:
    """A cache of probe results. A key must hold everything on which the result can depend."""

    def __init__(self) -> None:
        self.results: dict[Any, Any] = {}

    def once(self, key: Any, probe: Callable[[], T]) -> T:
        """Return the result of `probe`, which runs once per key.

        Raises:
            NotAnOp: `probe` raised it, or failed with another exception.
        """
        if key not in self.results:
            with undisturbed():
                self.results[key] = _outcome(probe)
        result: T | NotAnOp = self.results[key]
        if isinstance(result, NotAnOp):
            raise NotAnOp(*result.args)
        return result


def _outcome(probe: Callable[[], T]) -> T | NotAnOp:
    try:
        return probe()
    except NotAnOp as reason:
        return reason
    except Exception as error:
        # A model's code may do anything in a probe, so any exception means that it is left.
        return NotAnOp(f"its probe failed: {first_line(error)}")


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that not every module has."""
    return {name: value for name, value in vars(module).items() if name not in MODULE_STATE}


def attributes_key(module: nn.Module) -> Any:
    """Return a key that is equal for equal attributes. Values that are not of plain types are
    compared by identity."""
    return tuple(
        (name, type(value), _value_key(value)) for name, value in own_attributes(module).items()
    )


def leaf_key(module: nn.Module | None) -> Any:
    """Return a key for a module without parameters and buffers. Modules with equal keys compute the
    same."""
    if module is None:
        return None
    children = ((name, leaf_key(child)) for name, child in module._modules.items())
    return type(module), attributes_key(module), tuple(children)


def _value_key(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple((type(item), _value_key(item)) for item in value)
    return id(value)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
