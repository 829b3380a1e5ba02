"""Docstrings open as PyTorch's do, and a class name has one meaning."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from sources import ROOT, sources

pytestmark = pytest.mark.quick

# A reader has to read on to know what such a sentence is about.
RIDDLES = {"How", "Of", "That", "What", "Where", "Whether"}
ARTICLES = {"A", "An", "The"}
PROPERTIES = ("property", "cached_property", "overload")


def openings(file: Path, source: str) -> list[str]:
    """The docstrings that open with a riddle, or those of functions that open without a verb."""
    wrong = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            continue
        first = (ast.get_docstring(node) or "-").split()[0].rstrip(",")
        refused = RIDDLES
        if isinstance(node, ast.FunctionDef):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if not any(name in decorators for name in PROPERTIES):
                refused = RIDDLES | ARTICLES
        if first in refused:
            name = getattr(node, "name", "module")
            wrong.append(f"{file}:{getattr(node, 'lineno', 1)}: {name}: {first} ...")
    return wrong


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    files = [
        file.relative_to(ROOT) for file in sources("liger_ops", "meta", "lowering", "examples")
    ]
    wrong = [problem for file in files for problem in openings(file, (ROOT / file).read_text())]
    tests = [file.relative_to(ROOT) for file in sources("tests")]
    riddles = [problem for file in tests for problem in openings(file, (ROOT / file).read_text())]
    # A test's docstring may be the sentence that it tests.
    wrong += [p for p in riddles if p.split(": ")[-1].split()[0] in RIDDLES]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("first", sorted(RIDDLES | ARTICLES))
def test_another_opening_is_found(first: str) -> None:
    source = f'def f():\n    """{first} sum of x."""\n'
    assert len(openings(Path("x.py"), source)) == 1
    assert openings(Path("x.py"), source.replace(first, "Return the")) == []
    assert len(openings(Path("x.py"), f"@property\n{source}")) == (first in RIDDLES)


def test_a_class_name_has_one_meaning() -> None:
    """A class of each device may have the same name, in the same folder of both."""
    places = defaultdict(set)
    for file in sources("liger_ops", "meta", "lowering"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                folder = file.relative_to(ROOT).parent.as_posix()
                for device in ("cuda", "npu"):
                    folder = folder.replace(f"lowering/{device}", "lowering/DEVICE")
                places[node.name.lstrip("_")].add(
                    folder + ("" if "DEVICE" in folder else file.name)
                )
    wrong = {name: sorted(where) for name, where in places.items() if len(where) > 1}
    assert len(places) > 200 and not wrong, wrong
