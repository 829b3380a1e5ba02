"""What happens if a rewrite raises an exception, which is a bug of this package."""

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
    """Whether an exception in a rewrite is raised: `strict`, or if None the environment's."""
    return os.environ.get(STRICT, "0") not in ("", "0") if strict is None else strict


def first_line(error: Exception) -> str:
    """An error's type and the first line of its message."""
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
    """The result of a part of the rewrites, or `otherwise` with a warning if it raises an
    exception, unless that is strict."""
    try:
        return function(*args)
    except Exception as error:
        if is_strict(strict):
            raise
        failed(Report(at=(name, None)), error)
        return otherwise
