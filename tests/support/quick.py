"""The quick tier: how `-m quick` selects tests, and what they cover.

`@pytest.mark.quick("op", "folder")` on a test with many cases selects the first case for each
combination of the values of these parameters; without parameters, one case of the test. A module's
mark selects all of its tests. `path` names the way in which a test runs an op, if that is not the
parameter `folder`. `rewrites` names the rewrites that a test makes; without them it fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import op_parts

TESTS = op_parts.ROOT / "tests"
# These tests run in the environment of triton-ascend alone.
APART = TESTS / "npu"


@dataclass
class Tier:
    """The files of the collected tests, and the ops, rewrites and families that the tier covers."""

    files: set[Path] = field(default_factory=set)
    quick_files: set[Path] = field(default_factory=set)
    ops: set[tuple[str, str]] = field(default_factory=set)
    rewrites: set[str] = field(default_factory=set)
    families: set[str] = field(default_factory=set)

    @property
    def is_whole(self) -> bool:
        """True if every file with tests of the tier is collected."""
        files = {file for file in TESTS.rglob("test_*.py") if APART not in file.parents}
        return set(filter(has_quick_tests, files)) <= self.files


TIER = pytest.StashKey[Tier]()


def has_quick_tests(file: Path) -> bool:
    """Return whether a file marks a test. `-m quick` imports no other, which takes half of the time
    of collection."""
    return "mark.quick" in file.read_text()


def select(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Remove the mark from all but the first case of a combination; record what these cover."""
    tier = config.stash[TIER] = Tier()
    seen = set()
    for item in items:
        tier.files.add(item.path)
        mark = item.get_closest_marker("quick")
        if mark is None:
            continue
        values = item.callspec.params if hasattr(item, "callspec") else {}
        case = (item.nodeid.partition("[")[0], *(str(values[name]) for name in mark.args))
        if mark in item.own_markers and case in seen:
            item.own_markers.remove(mark)
            continue
        seen.add(case)
        tier.quick_files.add(item.path)
        tier.rewrites.update(mark.kwargs.get("rewrites", ()))
        if "op" in mark.args:
            path = values["folder"] if "folder" in mark.args else mark.kwargs["path"]
            tier.ops.add((op_parts.base(values["op"].name), path))
        if "family" in mark.args:
            tier.families.add(values["family"].name)


@contextmanager
def rewrites_are_made(item: pytest.Item) -> Iterator[None]:
    """Check that a test of the tier makes the rewrites that its mark names."""
    mark = item.get_closest_marker("quick")
    rewrites = set() if mark is None else set(mark.kwargs.get("rewrites", ()))
    if not rewrites:
        yield
        return
    from liger_ops.rewrites.engine.report import Report

    reports: list[Report] = []
    used = Report.used

    def recorded(report: Report, *args: Any) -> None:
        reports.append(report)
        used(report, *args)

    with mock.patch.object(Report, "used", recorded):
        yield
    made = {finding.op for report in reports for finding in report.findings if finding.used}
    assert made >= rewrites, f"the test makes {made}, and its mark names {rewrites}"
