"""The base class of the fusers of functions that a forward calls by their global names.

The class of a module that calls such a function is overridden. Its forward has the same code over a
copy of the file's globals, in which the name is bound to a function that calls the op. The file
itself does not change.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .. import classes
from ..planning import FusionPlan
from ..probing import NotAnOp
from .kind import Kind
from .rebinding import GlobalValues, chain_to, opaque, rebound, wrapped


class Functions(Kind):
    """The base class of fusers of functions. A function is traced as if it were the forward of a
    module, and its facts are what `recognise` returns."""

    def named(self, cls: type) -> Iterator[tuple[str, Any]]:
        """Yield the global names in a class's forward of functions that may be of this kind, with
        the functions."""
        raise NotImplementedError

    def recognise(self, function: Any) -> Any:
        """Return the facts about a function that replace its calls.

        Raises:
            NotAnOp: the function is left; the text gives the reason, in which "it" is the function.
        """
        raise NotImplementedError

    def report_options(self, facts: Any) -> dict[str, Any]:
        return {}

    @classmethod
    def make_caller(cls, function: Any, facts: Any) -> Callable[..., Any]:
        """Return a function of (args, kwargs) of a call, which calls the op, or returns None for a
        call that `function` may compute in another way."""
        raise NotImplementedError

    def look(self, plan: FusionPlan, name: str, module: nn.Module) -> None:
        if self.is_fused(name, module):
            return
        (op,), replaced = self.rewrites, []
        for called, function in self.named(classes.class_of(module)):
            try:
                try:
                    facts = self.probes.once(function, functools.partial(self.recognise, function))
                except NotAnOp as reason:
                    text = str(reason).replace(f"{op}: ", f"it computes no {op}: ")
                    raise NotAnOp(f"{called} {text.removeprefix('it ')}") from None
                if obstacle := call_obstacle(module, called):
                    raise NotAnOp(obstacle)
            except NotAnOp as reason:
                plan.leave(name, module, str(reason))
            else:
                plan.fuse(name, module, op, self.report_options(facts))
                # The id keeps apart the classes made for two functions with the same facts.
                replaced.append((called, id(function), facts))
        if replaced:
            plan.changes.append(lambda: classes.override(module, self.name, tuple(replaced)))

    @classmethod
    def methods(cls, base: Any, facts: Any) -> dict[str, Any]:
        forward = base.forward
        for name, _, function_facts in facts:
            forward = rebound(
                forward, {name: functools.partial(cls.replacement, facts=function_facts)}
            )
        return {"forward": forward}

    @classmethod
    def replacement(cls, function: Callable[..., Any], facts: Any) -> Callable[..., Any]:
        """Return the function to which a name is bound instead of `function`.

        It calls `function` itself if the op does not compute the call, or if a global function
        that `function` calls has been replaced since.
        """
        computed, called = cls.make_caller(function, facts), GlobalValues({}, ())
        called.add_functions(function)

        @functools.wraps(function)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            result = computed(args, kwargs) if called.are_unchanged() else None
            return function(*args, **kwargs) if result is None else result

        return replaced


class ForwardHolder(nn.Module):
    """A module whose forward is a function, so that the function can be traced as one."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function


def globals_of(caller: Any) -> Iterator[tuple[str, Any]]:
    """Yield the global names, with their values, that a function and those it wraps refer to."""
    for function in wrapped(caller):
        for name in function.__code__.co_names:
            yield name, function.__globals__.get(name)


def call_obstacle(module: nn.Module, name: str) -> str | None:
    """Return the reason that a global name in a forward cannot be bound to another function, or
    None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if "forward" in vars(module):
        return "the instance has a forward of its own"
    chain = chain_to(classes.class_of(module).forward, name)
    if outer := opaque(chain):
        return f"its forward is wrapped by {outer.__qualname__}, which cannot be made again"
    instructions = list(dis.get_instructions(chain[-1]))
    if any(instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for instruction in instructions):
        return "its forward writes to the globals of its file"
    operations = {
        instruction.opname
        for instruction in instructions
        if instruction.opcode in dis.hasname and instruction.argval == name
    }
    if operations != {"LOAD_GLOBAL"}:
        return f"its forward uses the name {name} for more than a call"
    return None
