"""Which modules of a model `liger_ops.invariant` covers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..invariant_mode import NotInvariantError
from . import rows
from .context import invariant

Inputs = Callable[[int], dict[str, Any]]
# Numbers of tokens, which are no sizes of a model.
LENGTHS = (37, 53)


@dataclass(frozen=True)
class Coverage:
    """The modules of a model that are not covered.

    Attributes:
        reasons: the name of a module -> why it is not covered. Empty for a model that is.
    """

    reasons: dict[str, str]

    def __bool__(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        if not self.reasons:
            return "every module is covered"
        lines = (f"  {name or '(the model itself)'}: {why}" for name, why in self.reasons.items())
        return "\n".join(("not covered:", *lines))


def coverage(model: Any, inputs: Inputs | None = None) -> Coverage:
    """Run a model within `liger_ops.invariant` with sequences of two lengths.

    A module is not covered if it does what is refused, or if it sums as many numbers as there are
    tokens: the columns of its functions of rows then differ between the two.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"invariant: model must be a torch.nn.Module, got {type(model).__name__}")
    call = inputs or _tokens_of(model)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), invariant():
            short, long = (_Recorded(model, call(length)) for length in LENGTHS)
    finally:
        model.train(was_training)
    if short.error is not None:
        name, error = short.error
        return Coverage({name: str(error).removeprefix("liger_ops.invariant: ")})
    reasons = {}
    for name in short.used:
        others = short.used[name] - long.used[name]
        if others:
            what = sorted({operation for operation, _ in others})
            reasons[name] = f"it sums as many numbers as there are tokens: {', '.join(what)}"
    return Coverage(reasons)


def _tokens_of(model: nn.Module) -> Inputs:
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is None:
        raise ValueError(
            "invariant: a model without config.vocab_size needs inputs, a function of a number of"
            " tokens that returns the keyword arguments of a call"
        )
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> dict[str, Any]:
        words = torch.randint(0, size, (1, length), generator=generator)
        return {"input_ids": words.to(device), "use_cache": False}

    return tokens


class _Recorded:
    """The functions of rows of a model's modules in a call.

    Attributes:
        used: the name of a module -> its functions of rows, with their columns.
        error: the module that did what is refused, and the error; or None.
    """

    def __init__(self, model: nn.Module, given: dict[str, Any]) -> None:
        self.used: defaultdict[str, set[tuple[str, Hashable]]] = defaultdict(set)
        self.error: tuple[str, NotInvariantError] | None = None
        self.within: list[str] = [""]
        hooks = []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(self._enter(name)))
            hooks.append(module.register_forward_hook(self._leave))
        rows.recorders.append(self._record)
        try:
            model(**given)
        except NotInvariantError as error:
            self.error = (self.within[-1], error)
        finally:
            rows.recorders.remove(self._record)
            for hook in hooks:
                hook.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda module, args: self.within.append(name)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self.within.pop()

    def _record(self, name: str, columns: Hashable) -> None:
        self.used[self.within[-1]].add((name, columns))
