"""Run the rewrites in every compilation by Inductor in this process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from typing import Any

from torch import fx

from ..torch_private import CustomGraphPass, inductor, inductor_config
from .default_rewrites import checked_flag, chosen
from .graph_pass import LigerGraphPass

# The calls of `enable` that are in force, the oldest first.
_calls: list[Enabled] = []
_lock = threading.Lock()
# Whether Inductor's `compile_fx` runs: it calls itself again, after it has set the options of the
# call, which must not be replaced by ours.
_is_inner: ContextVar[bool] = ContextVar("liger_ops: Inductor calls itself", default=False)


def enable(rewrites: str | Collection[str] | None = None, *, strict: bool | None = None) -> Enabled:
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

    Raises:
        TypeError: rewrites or strict has another type.
        ValueError: rewrites names a rewrite that does not exist.
    """
    names = chosen(rewrites, True, "enable: rewrites")
    call = Enabled(LigerGraphPass(names, checked_flag(strict, "enable: strict"), True))
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
        self.ours = ours

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *error: Any) -> None:
        with _lock:
            _undo([self])


def _undo(calls: Collection[Enabled]) -> None:
    _calls[:] = [call for call in _calls if call not in calls]
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
