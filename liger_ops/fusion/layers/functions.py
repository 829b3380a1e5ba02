"""Kinds of functions: those of a file that a forward calls by their global names.

The class of a module that calls one is overridden with the same forward over a copy of the file's
globals, in which the name is bound to another function. The file itself does not change.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .. import classes
from ..planning import Plan
from ..probing import NotAnOp
from .kind import Kind
from .rebinding import Names, chain_to, opaque, rebound, wrapped


class Functions(Kind):
    """A row of the table of kinds, for functions. Facts are what `recognised` returns of one, which
    is traced as if it were the forward of a module."""

    def named(self, cls: type) -> Iterator[tuple[str, Any]]:
        """The functions that a class's forward refers to and that may be of this kind, by name."""
        raise NotImplementedError

    def recognised(self, function: Any) -> Any:
        """What replaces a function. Raises NotAnOp if it is left; "it" is the function."""
        raise NotImplementedError

    def options_of(self, facts: Any) -> dict[str, Any]:
        return {}

    @classmethod
    def computed(cls, function: Any, facts: Any) -> Callable[..., Any]:
        """A function of the arguments and keyword arguments of a call, which returns None for what
        `function` may compute in another way."""
        raise NotImplementedError

    def look(self, plan: Plan, name: str, module: nn.Module) -> None:
        if self.is_fused(name, module):
            return
        (op,), found = self.rewrites, []
        for called, function in self.named(classes.class_of(module)):
            try:
                try:
                    facts = self.probes.once(function, functools.partial(self.recognised, function))
                except NotAnOp as reason:
                    text = str(reason).replace(f"{op}: ", f"it computes no {op}: ")
                    raise NotAnOp(f"{called} {text.removeprefix('it ')}") from None
                if obstacle := call_obstacle(module, called):
                    raise NotAnOp(obstacle)
            except NotAnOp as reason:
                plan.leave(name, module, str(reason))
            else:
                plan.fuse(name, module, op, self.options_of(facts))
                # A class made for one function is not used for another of the same facts.
                found.append((called, id(function), facts))
        if found:
            plan.changes.append(lambda: classes.override(module, self.name, tuple(found)))

    @classmethod
    def methods(cls, base: Any, facts: Any) -> dict[str, Any]:
        forward = base.forward
        for name, _, known in facts:
            forward = rebound(forward, {name: functools.partial(cls.replacement, facts=known)})
        return {"forward": forward}

    @classmethod
    def replacement(cls, function: Callable[..., Any], facts: Any) -> Callable[..., Any]:
        """What a name is bound to instead of a function. The function itself is called once one of
        those that it calls is another."""
        computed, called = cls.computed(function, facts), Names({}, ())
        called.add_functions(function)

        @functools.wraps(function)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            result = computed(args, kwargs) if called.are_unchanged() else None
            return function(*args, **kwargs) if result is None else result

        return replaced


class Standing(nn.Module):
    """Stands for the module of which a function is the forward."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function


def globals_of(caller: Any) -> Iterator[tuple[str, Any]]:
    """The global names that a function, and those that it wraps, refer to, and their values."""
    for function in wrapped(caller):
        for name in function.__code__.co_names:
            yield name, function.__globals__.get(name)


def call_obstacle(module: nn.Module, name: str) -> str | None:
    """Reason that a forward cannot call another function by a global name, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if "forward" in vars(module):
        return "the instance has a forward of its own"
    chain = chain_to(classes.class_of(module).forward, name)
    if outer := opaque(chain):
        return f"its forward is wrapped by {outer.__qualname__}, which cannot be made again"
    instructions = list(dis.get_instructions(chain[-1]))
    if any(one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for one in instructions):
        return "its forward writes to the globals of its file"
    operations = {
        one.opname for one in instructions if one.opcode in dis.hasname and one.argval == name
    }
    if operations != {"LOAD_GLOBAL"}:
        return f"its forward uses the name {name} for more than a call"
    return None
