"""The README and the documents refer to files and names that exist, and say a thing once."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT))
)


@each_document
def test_no_heading_stands_twice(document: Path) -> None:
    headings = re.findall(r"^#+ .*$", document.read_text(), re.MULTILINE)
    assert headings and len(set(headings)) == len(headings)


@each_document
def test_links_lead_to_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    targets = [link for link in links if not link.startswith("http")]
    assert [link for link in targets if not (document.parent / link).exists()] == []


@each_document
def test_commands_name_files_that_are_there(document: Path) -> None:
    # `python tests/x.py`, `make test ARGS="tests/test_y*.py"`; not tests/test_<op>.py.
    name = r"(?:tests|examples|lowering|meta|liger_ops)/[\w./*-]+(?![\w./*<-])"
    paths = re.findall(name, document.read_text())
    missing = [path for path in paths if not list(ROOT.glob(path.rstrip("./")))]
    assert missing == []


def test_make_lists_its_targets_in_columns() -> None:
    lines = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True,
        check=True,
    ).stdout.splitlines()  # fmt: skip
    described = re.findall(r"^([a-z-]+):.*## (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    width = max(len(name) for name, _ in described)
    assert lines == [f"make {name:{width}}  {text}" for name, text in described]


def test_documents_that_point_to_nothing_are_found(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("# A\n\n[b](nothing.md)\n\n`tests/test_nothing.py`\n\n# A\n")
    for check in (
        test_no_heading_stands_twice,
        test_links_lead_to_files,
        test_commands_name_files_that_are_there,
    ):
        with pytest.raises(AssertionError):
            check(document)
