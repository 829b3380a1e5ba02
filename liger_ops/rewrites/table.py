"""Print findings as a table."""

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
    """Return the lines of the table: the ops that are used, then the places that are left.

    `device` is the device of findings that name none: modules.
    """
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
    """Return an entry for each group of findings with the same text at the same place.

    An entry has their number, the text and the place. Modules whose names differ only in the
    position of their layer are at one place.
    """
    width = max(60, shutil.get_terminal_size((100, 24)).columns)
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        place = _POSITION.sub("*", finding.where) if finding.class_name else finding.where
        groups.setdefault((_text(finding), place), []).append(finding)
    lines = []
    for (text, place), group in groups.items():
        lines += textwrap.wrap(
            f"{len(group)} x {text}", width, initial_indent="  ", subsequent_indent="      "
        )
        where = group[0].where if len(group) == 1 else place
        where = f"      {where or '(the model itself)'}"
        lines.append(where if len(where) <= width else f"{where[: width - 4]} ...")
    return lines


def _text(finding: Finding) -> str:
    """Write a finding's op, then why it is not used, or the module's class, or the kernel."""
    options = ", ".join(f"{name}={value!r}" for name, value in finding.options.items())
    subject = finding.op or finding.class_name
    return f"{subject}{f'({options})' if options else ''}: {_detail(finding)}"


def _detail(finding: Finding) -> str:
    if finding.reason is not None:
        return finding.reason
    saved = ""
    if finding.logits_bytes:
        # bytes a token * 1,000 tokens / 1e6 bytes a MB
        saved = f", without {finding.logits_bytes / 1000:,.1f} MB of logits per 1,000 tokens"
    if finding.class_name:
        return finding.class_name + saved
    kept = ", by default left to Inductor" if finding.op in KEPT_BY_INDUCTOR else ""
    return _implementation(finding) + kept + saved


def _implementation(finding: Finding) -> str:
    """Return the name of the implementation that runs a finding's op on its device."""
    if finding.op not in COMPOSED and finding.op not in OPS:
        return "PyTorch's own"
    name = f"{finding.op}_forward" if finding.op in COMPOSED else finding.op
    device = finding.device if finding.device in DEVICES else ""
    return implementation(OPS[name], device)
