"""docs/internals lists its notes and the mechanisms of the package, each with its file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/internals"
INDEX = (FOLDER / "README.md").read_text()
# More are more than a maintainer holds in the head: merge two before adding another.
MOST_MECHANISMS = 125

pytestmark = pytest.mark.quick


def mechanisms() -> list[tuple[str, str]]:
    return re.findall(r"^\| (.*) \| `([\w./]+)` \|$", INDEX, re.MULTILINE)


def test_every_note_is_listed() -> None:
    notes = {file.name for file in FOLDER.glob("*.md")} - {"README.md"}
    assert set(re.findall(r"^\| \[(\w+\.md)\]", INDEX, re.MULTILINE)) == notes
    assert len(notes) >= 7


def test_mechanisms_are_in_their_files() -> None:
    rows = mechanisms()
    names = [name for name, _ in rows]
    assert 100 < len(rows) <= MOST_MECHANISMS and len(set(names)) == len(names)
    assert [file for _, file in rows if not (ROOT / file).is_file()] == []
