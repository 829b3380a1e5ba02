"""Handle an exception in a rewrite, which is a bug of this package: warn, or raise it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import TypeVar

from .report import Finding, Report, device_of, source_line

STRICT = "LIGER_OPS_STRICT"
T = TypeVar("T")
D = TypeVar("D")


def is_strict(strict: bool | None) -> bool:
    """Return whether an exception in a rewrite is raised; None stands for LIGER_OPS_STRICT."""
    return os.environ.get(STRICT, "0") not in ("", "0") if strict is None else strict


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def failed(report: Report, error: Exception) -> Report:
    """Warn of an error at `report.at`, and return the report of an unchanged graph."""
    rewrite, node = report.at
    where = "" if node is None else source_line(node)
    reason = f"the rewrite failed, {type(error).__name__}: {error}"
    warnings.warn(
        f"liger_ops: the rewrite {rewrite!r} failed{f' at {where}' if where else ''}"
        f" ({type(error).__name__}: {error}). This graph is compiled without any rewrite."
        " Please report this with the output of `python -m liger_ops` and the traceback of a run"
        f" with options={{'strict': True}}, or with {STRICT}=1 in the environment.",
        stacklevel=2,
    )
    return Report([Finding(rewrite, reason, where, "" if node is None else device_of(node))])


def guarded(
    name: str, strict: bool | None, function: Callable[..., T], *args: object, otherwise: D
) -> T | D:
    """Call `function`, a step of the rewrites; if it raises, warn and return `otherwise`.

    With `strict` the exception is raised.
    """
    try:
        return function(*args)
    except Exception as error:
        if is_strict(strict):
            raise
        failed(Report(at=(name, None)), error)
        return otherwise
