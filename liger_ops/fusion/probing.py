"""What the probes share: each runs a copy of a model's code on the CPU and looks at the result."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

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
    """The code computes what no op computes; the text says why, of "it"."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """In here code runs on the CPU without gradients and autocast, and leaves no trace: no warning,
    and no change of a random number generator."""
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.autocast(DEVICE.type, enabled=False),
        torch.no_grad(),
        DEVICE,
    ):
        warnings.simplefilter("ignore")
        yield


class Probes:
    """Probes of which each is made once: a key holds all that the result can depend on."""

    def __init__(self) -> None:
        self.found: dict[Any, Any] = {}

    def once(self, key: Any, probe: Callable[[], T]) -> T:
        """What `probe` returns.

        Raises:
            NotAnOp: what `probe` raises, or that it failed.
        """
        if key not in self.found:
            with undisturbed():
                self.found[key] = _outcome(probe)
        found: T | NotAnOp = self.found[key]
        if isinstance(found, NotAnOp):
            raise NotAnOp(*found.args)
        return found


def _outcome(probe: Callable[[], T]) -> T | NotAnOp:
    try:
        return probe()
    except NotAnOp as reason:
        return reason
    except Exception as error:
        # Under every probe: what code of a model's may do has no end, and a module that cannot be
        # probed is left.
        return NotAnOp(f"its probe failed: {first_line(error)}")


def has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks, None) for hooks in HOOKS)


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are not those of every module."""
    return {name: value for name, value in vars(module).items() if name not in MODULE_STATE}


def attributes_key(module: nn.Module) -> Any:
    """Equal for modules of equal attributes; one that is no plain value equals itself alone."""
    return tuple(
        (name, type(value), _value_key(value)) for name, value in own_attributes(module).items()
    )


def leaf_key(module: nn.Module | None) -> Any:
    """Equal for modules without parameters, children and buffers that compute the same."""
    if module is None or module._modules:
        return id(module)
    return type(module), attributes_key(module)


def _value_key(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple((type(item), _value_key(item)) for item in value)
    return id(value)


def uniform(shape: Sequence[int], seed: int) -> Tensor:
    """Between -0.5 and 0.5."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float32, device=DEVICE) - 0.5


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
