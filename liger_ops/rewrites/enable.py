"""Run the rewrites in every compilation by Inductor in this process, or as a
`pre_grad_custom_pass`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from .. import invariant_mode
from ..compile_cache import package_hash
from ..torch_private import CustomGraphPass, inductor, inductor_config
from . import rewrite
from .default_rewrites import checked_flag, chosen
from .engine.canonical import OpOverload
from .losses.losses import warn


def graph_pass(
    rewrites: str | Collection[str] | None = None, *, strict: bool | None = None
) -> LigerGraphPass:
    """Return the rewrites of the backend `liger` as a pass, to be combined with other passes.

        torch.compile(model, options={"pre_grad_custom_pass": liger_ops.graph_pass()})

    Its `uuid()` contains a hash of this package, so that Inductor's caches work and an upgrade
    invalidates them. On a cache hit neither the pass nor the compilation runs.

    Args:
        rewrites: names from `liger_ops.rewrites.REWRITES`, or "all"; None for the default
            before Inductor.
        strict: whether an exception in a rewrite is raised; by default the graph stays unchanged,
            with a warning.

    Returns:
        The pass. It applies to the compilations whose configuration names it; `liger_ops.enable`
        sets it for all.

    Raises:
        TypeError: rewrites or strict has another type.
        ValueError: rewrites names a rewrite that does not exist. The pass itself raises ValueError
            for a graph of ATen operators, such as torch.export's.
    """
    return LigerGraphPass(
        chosen(rewrites, True, "graph_pass: rewrites"), checked_flag(strict, "graph_pass: strict")
    )


class LigerGraphPass(CustomGraphPass):
    """The result of `liger_ops.graph_pass`.

    With `skips_exported` it leaves a graph of ATen operators as it is, instead of raising an error.
    """

    def __init__(
        self, names: Collection[str], strict: bool | None, skips_exported: bool = False
    ) -> None:
        self.names, self.strict, self.skips_exported = names, strict, skips_exported

    def __call__(self, graph: fx.Graph) -> None:
        if self.skips_exported and exported_operator(graph) is not None:
            return
        refuse_exported(graph)
        if _is_for_a_subgraph():
            return
        module, strict = graph.owning_module, self.strict
        if module is None:
            # Without an owning module the graph cannot be restored if a rewrite fails.
            module, strict = fx.GraphModule(torch.nn.Module(), graph), True
        warn(rewrite(module, self.names, strict=strict).findings)

    def uuid(self) -> str:
        return f"liger_ops {package_hash()} {','.join(sorted(self.names))}"


def _is_for_a_subgraph() -> bool:
    """Return whether Inductor is at a subgraph, for which it calls its own function recursively.

    Subgraphs are rewritten with the outer graph, which shows how they are called.
    """
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth += frame.f_code.co_name == "_recursive_pre_grad_passes"
        frame = frame.f_back  # type: ignore[assignment]
    return depth > 1


def exported_operator(graph: fx.Graph) -> str | None:
    """Return the name of an ATen operator in the graph; None for a graph of Dynamo.

    Dynamo's graphs hold the functions and methods that the code calls, with example values in
    `example_value`. `torch.export` and AOTAutograd make graphs of ATen operators, with `val`.
    """
    if any("example_value" in node.meta for node in graph.nodes):
        return None
    targets = (node.target for node in graph.nodes if "val" in node.meta)
    return next((str(target) for target in targets if isinstance(target, OpOverload)), None)


def refuse_exported(graph: fx.Graph) -> None:
    """Raise ValueError for a graph of ATen operators, in which no pattern would match."""
    operator = exported_operator(graph)
    if operator is not None:
        raise ValueError(
            "graph_pass: the graph must be one of Dynamo's, which Inductor hands to"
            f" pre_grad_custom_pass, got one of ATen's operators ({operator}), as torch.export and"
            " AOTAutograd make it; to export a model with the ops of liger_ops, call"
            " liger_ops.fuse(model) before torch.export.export"
        )


# The calls of `enable` that are in force, the oldest first.
_calls: list[Enabled] = []
_lock = threading.Lock()
# Whether Inductor's `compile_fx` runs: it calls itself again, after it has set the options of the
# call, which must not be replaced by ours.
_is_inner: ContextVar[bool] = ContextVar("liger_ops: Inductor calls itself", default=False)


def enable(
    rewrites: str | Collection[str] | None = None, *, strict: bool | None = None,
    invariant: bool = False,
) -> Enabled:  # fmt: skip
    """Let every `torch.compile` of this process that goes to Inductor use the ops.

        liger_ops.enable()
        model = torch.compile(model)

    Models do not change, and no backend has to be named: Trainer, TRL, accelerate and torchtitan
    use the rewrites through their own switches, such as `TrainingArguments(torch_compile=True)`.
    The rewrites are those of `torch.compile(model, backend="liger")`, and `liger_ops.explain`
    describes them. An exported model, which AOTInductor compiles, is not rewritten: call `fuse`
    before exporting. Inductor's caches stay valid, and are keyed by the set of rewrites.

    Every thread is included, also one that was started before. Inductor's settings, which each
    thread has for itself, stay as they are. While Inductor compiles, a `pre_grad_custom_pass` that
    is set runs first and the rewrites second. A call with
    `torch.compile(options={"pre_grad_custom_pass": ...})` runs that pass alone. Functions that are
    already compiled change only when they are compiled again, as after `torch.compiler.reset()`.

    Calls nest: the newest one is in force, and `disable` undoes it, so that the one before it is in
    force again. The result is a context manager that undoes its own call:

        with liger_ops.enable("all"):
            model(**batch)  # compiles here

    Args:
        rewrites: names from `liger_ops.rewrites.REWRITES`, or "all"; None for the default
            before Inductor.
        strict: whether an exception in a rewrite is raised; by default the graph stays unchanged,
            with a warning.
        invariant: whether `liger_ops.invariant` is in force for the process until the call is
            undone. Functions of `torch.compile` are then compiled as is said there.

    Raises:
        TypeError: rewrites, strict or invariant has another type.
        ValueError: rewrites names a rewrite that does not exist.
    """
    names = chosen(rewrites, True, "enable: rewrites")
    call = Enabled(LigerGraphPass(names, checked_flag(strict, "enable: strict"), True))
    if checked_flag(invariant, "enable: invariant"):
        call.undoing.enter_context(invariant_mode.context())
    with _lock:
        _calls.append(call)
        if not isinstance(inductor.compile_fx, WithRewrites):
            inductor.compile_fx = WithRewrites(inductor.compile_fx)
    return call


def disable() -> None:
    """Undo the newest call of `enable`. Functions that are already compiled do not change."""
    with _lock:
        _undo(_calls[-1:])


class Enabled:
    """The result of `enable`: as a context manager it undoes the call."""

    def __init__(self, ours: LigerGraphPass) -> None:
        self.ours, self.undoing = ours, ExitStack()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *error: Any) -> None:
        with _lock:
            _undo([self])


def _undo(calls: Collection[Enabled]) -> None:
    _calls[:] = [call for call in _calls if call not in calls]
    for call in calls:
        call.undoing.close()
    if not _calls and isinstance(inductor.compile_fx, WithRewrites):
        inductor.compile_fx = inductor.compile_fx.compile_fx


class WithRewrites:
    """Inductor's `compile_fx` with our pass; every compilation looks it up in its module."""

    def __init__(self, compile_fx: Callable[..., Any]) -> None:
        functools.update_wrapper(self, compile_fx)
        self.compile_fx = compile_fx

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        newest = _calls[-1:]
        if not newest or _is_inner.get():
            return self.compile_fx(*args, **kwargs)
        token = _is_inner.set(True)
        together = _together(inductor_config.pre_grad_custom_pass, newest[0].ours)
        try:
            with inductor_config.patch(pre_grad_custom_pass=together):
                return self.compile_fx(*args, **kwargs)
        finally:
            _is_inner.reset(token)


def _together(theirs: Any, ours: LigerGraphPass) -> CustomGraphPass:
    """Return the pass that a thread has set, from torch 2.13 on perhaps several, and then ours."""
    if theirs is None:
        return ours
    return Together(tuple(theirs) if isinstance(theirs, (tuple, list)) else (theirs,), ours)


class Together(CustomGraphPass):
    """Other passes, followed by ours, as one pass."""

    def __init__(self, others: Sequence[Callable[[fx.Graph], None]], ours: CustomGraphPass) -> None:
        self.others, self.ours = others, ours

    def __call__(self, graph: fx.Graph) -> None:
        for other in self.others:
            other(graph)
        self.ours(graph)

    def uuid(self) -> Any:
        """Return an identifier of all passes, or None if one of them has none.

        Inductor then caches nothing, as it would with that pass alone.
        """
        uuids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.others]
        return None if None in uuids else str([*uuids, self.ours.uuid()])
