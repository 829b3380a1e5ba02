"""Findings printed as a table."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence

from ..library import COMPOSED, DEVICES, OPS, implementation
from .default_rewrites import KEPT_BY_INDUCTOR
from .engine.report import Finding

# A number in the name of a module: the position of a layer in its list.
_POSITION = re.compile(r"(?<![^.])\d+(?![^.])")


def table(findings: Sequence[Finding], device: str = "") -> list[str]:
    """The lines of the table: the ops that are used, then the places that are left. `device` is
    that of modules."""
    used = [finding for finding in findings if finding.used]
    left = [finding for finding in findings if not finding.used]
    lines = [f"{counted(len(used), 'op')} used", *_entries(used)]
    without = sorted({finding.device or device for finding in used} - {*DEVICES, "", "meta"})
    if without:
        lines.append(f"  Nothing is faster on {' and '.join(without)}, where there are no kernels.")
    if left:
        lines += [f"{counted(len(left), 'place')} left", *_entries(left)]
    return lines


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _entries(findings: Sequence[Finding]) -> list[str]:
    """An entry for each set of findings that print the same: their number, the text, the place.

    Modules whose names differ in the position of their layer are at one place.
    """
    width = max(60, shutil.get_terminal_size((100, 24)).columns)
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        place = _POSITION.sub("*", finding.where) if finding.class_name else finding.where
        alike.setdefault((_text(finding), place), []).append(finding)
    lines = []
    for (text, place), found in alike.items():
        lines += textwrap.wrap(
            f"{len(found)} x {text}", width, initial_indent="  ", subsequent_indent="      "
        )
        where = found[0].where if len(found) == 1 else place
        where = f"      {where or '(the model itself)'}"
        lines.append(where if len(where) <= width else f"{where[: width - 4]} ...")
    return lines


def _text(finding: Finding) -> str:
    """The op and what is said of it: the reason, or else the module's class or the kernel."""
    options = ", ".join(f"{name}={value!r}" for name, value in finding.options.items())
    what = finding.op or finding.class_name
    return f"{what}{f'({options})' if options else ''}: {_detail(finding)}"


def _detail(finding: Finding) -> str:
    if finding.reason is not None:
        return finding.reason
    saved = ""
    if finding.logits_bytes:
        # A million bytes for 1,000 tokens is a kilobyte for each.
        saved = f", without {finding.logits_bytes / 1000:,.1f} MB of logits per 1,000 tokens"
    if finding.class_name:
        return finding.class_name + saved
    kept = ", by default left to Inductor" if finding.op in KEPT_BY_INDUCTOR else ""
    return _implementation(finding) + kept + saved


def _implementation(finding: Finding) -> str:
    """The implementation that runs an op on its device."""
    if finding.op not in COMPOSED and finding.op not in OPS:
        return "PyTorch's own"
    name = f"{finding.op}_forward" if finding.op in COMPOSED else finding.op
    device = finding.device if finding.device in DEVICES else ""
    return implementation(OPS[name], device)
