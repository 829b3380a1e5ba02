"""Rotary embeddings: the function of queries, keys and tables that a forward calls becomes rope.

In transformers it is a function of the model's file, which every attention of that file calls. The
class of each attention is overridden with the same forward over a copy of the file's globals, in
which the function's name is bound to rope. The file itself does not change.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ... import library
from .. import classes
from ..planning import Plan
from ..probing import NotAnOp, Probes, own_attributes
from .rebinding import Names, rebound
from .rotary import SECTIONS, WIDENED, Rotary, parameters_of
from .rotary_trace import find

KIND = "rotary embedding"

ROTARY_NAME = re.compile(r"apply_(\w+_)?(rotary|rope)")


def plan(model: nn.Module) -> Plan:
    """Override the forward of every module that calls a function which computes rope."""
    probes = Probes()

    def look(plan: Plan, name: str, module: nn.Module) -> None:
        if KIND in classes.overrides(module):
            return
        for reason in _not_called_as_rope(module):
            plan.leave(name, module, reason)
        rotaries = []
        for function_name, function in _functions(classes.class_of(module)):
            try:
                rotary = probes.once(function, functools.partial(find, function_name, function))
                obstacle = call_obstacle(module, function_name)
                if obstacle is not None:
                    raise NotAnOp(obstacle)
            except NotAnOp as reason:
                plan.leave(name, module, str(reason))
            else:
                rotaries.append(rotary)
                plan.fuse(name, module, "rope", dict(rotary.forms[0].options))
        if rotaries:
            plan.changes.append(lambda: classes.override(module, KIND, tuple(rotaries)))

    return Plan(KIND, model, look)


@classes.kind(KIND)
def methods(base: Any, rotaries: tuple[Rotary, ...]) -> dict[str, Callable[..., Any]]:
    forward = base.forward
    for rotary in rotaries:
        forward = rebound(forward, {rotary.name: functools.partial(_replacement, rotary=rotary)})
    return {"forward": forward}


def _functions(cls: Any) -> list[tuple[str, Any]]:
    """The global functions that a class's forward refers to and that may be rope."""
    return [
        (name, function.__globals__[name])
        for function in wrapped(getattr(cls, "forward", None))
        for name in function.__code__.co_names
        if parameters_of(function.__globals__.get(name))
    ]


def _not_called_as_rope(module: nn.Module) -> Iterator[str]:
    """Reasons that functions with a rotary name, which a reader of the report expects, are left."""
    forward = getattr(classes.class_of(module), "forward", None)
    for name, function in _named_rotary(forward):
        if inspect.isfunction(function) and not parameters_of(function):
            names = ", ".join(inspect.signature(function).parameters)
            yield f"{name} takes ({names}), not queries, keys and their tables"
    # As in the attentions of diffusers, whose forward calls a processor.
    for value in own_attributes(module).values():
        call = getattr(type(value), "__call__", None)  # noqa: B004
        if not isinstance(value, nn.Module):
            for name, _ in _named_rotary(call):
                yield f"{name} is called by its {type(value).__name__}, not by its forward"


def _named_rotary(caller: Any) -> Iterator[tuple[str, Any]]:
    """The global functions that a function refers to by a name that suggests rope."""
    for function in wrapped(caller):
        for name in function.__code__.co_names:
            if ROTARY_NAME.search(name) and callable(function.__globals__.get(name)):
                yield name, function.__globals__[name]


def wrapped(function: Any) -> list[types.FunctionType]:
    """A function and the functions that it wraps, from the outermost in."""
    found = []
    while inspect.isfunction(function) and function not in found:
        found.append(function)
        function = getattr(function, "__wrapped__", None)
    return found


def call_obstacle(module: nn.Module, name: str) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if "forward" in vars(module):
        return "the instance has a forward of its own"
    chain = wrapped(classes.class_of(module).forward)
    caller = next(function for function in chain if name in function.__code__.co_names)
    for outer, inner in zip(chain, chain[1:], strict=False):
        if outer is caller:
            break
        if not any(cell.cell_contents is inner for cell in outer.__closure__ or ()):
            return f"its forward is wrapped by {outer.__qualname__}, which cannot be made again"
    instructions = list(dis.get_instructions(caller))
    if any(one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for one in instructions):
        return "its forward writes to the globals of its file"
    operations = {
        one.opname for one in instructions if one.opcode in dis.hasname and one.argval == name
    }
    if operations != {"LOAD_GLOBAL"}:
        return f"its forward uses the name {name} for more than a call"
    return None


def _replacement(original: Callable[..., Any], rotary: Rotary) -> Callable[..., Any]:
    """A function that calls rope for the forms in `rotary`, and the original for any other."""
    op = library.OPS["rope"].overload
    called = Names({}, ())
    called.add_functions(original)

    @functools.wraps(original)
    def rotated(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(rotary.parameters, args, strict=False))
        given.update(kwargs)
        form = rotary.form_of(given)
        if form is None or not called.are_unchanged():
            return original(*args, **kwargs)
        q, k, *tables = (given[name] for name in rotary.parameters[: 2 + rotary.tables])
        if rotary.wide_tables == WIDENED and tables[0].dtype is not q.dtype:
            q, k = q.float(), k.float()
        return form(op, q, k, tables, given.get(SECTIONS))

    return rotated
