"""Choose the test files that a change concerns, for `make test-changed`.

A changed test file is chosen; so are those that import a changed module, of the package or of
tests/support; and those in the folder of a changed source's subject: tests/ops/norms for
lowering/cuda/norms/rms_norm.py, tests/rewrites/losses for liger_ops/rewrites/losses/loss_head.py.
"""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterable
from pathlib import Path

from sources import ROOT, imported_modules, module_of, sources

PACKAGE = ("liger_ops", "meta", "lowering")


def changed_files(base: str) -> set[Path]:
    """Return the files that differ from the last commit that this branch and `base` share."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
        )
        return done.stdout.splitlines()

    (shared,) = git("merge-base", base, "HEAD")
    untracked = git("ls-files", "--others", "--exclude-standard")
    return {Path(name) for name in (*git("diff", "--name-only", shared), *untracked)}


def chosen(changed: Iterable[Path]) -> set[Path]:
    """Return the test files that a change of these files concerns, as paths from the root."""
    changed = [file for file in changed if file.suffix == ".py" or file.parts[0] == "docs"]
    names = {_name(file) for file in changed}
    support = {file: _imports(file) for file in sources("tests/support")}
    # A module of tests/support that imports a changed one of tests/support is changed as well.
    before = -1
    while len(names) > before:
        before = len(names)
        theirs = {name for name in names if not name.startswith("liger_ops")}
        names |= {file.stem for file, imported in support.items() if imported & theirs}
    folders = [folder for file in changed if (folder := _folder(file)) is not None]
    return {
        test.relative_to(ROOT)
        for test in (ROOT / "tests").rglob("test_*.py")
        if test.relative_to(ROOT) in changed
        or _imports(test) & names
        or any(folder in test.parents for folder in folders)
    }


def _name(file: Path) -> str:
    """Return the name by which tests import a file."""
    return module_of(file) if file.parts[0] in PACKAGE else file.stem


def _folder(file: Path) -> Path | None:
    """Return the folder of the tests of a source's subject, None if it has none of its own."""
    parts = file.parent.parts
    if parts[0] == "docs":
        parts = ("project",)
    elif parts[0] == "meta":
        parts = ("ops", file.stem)
    elif parts[0] == "lowering":
        parts = ("ops", *parts[2:])
    elif parts[0] == "liger_ops":
        parts = parts[1:]
    else:
        return None
    folder = ROOT.joinpath("tests", *parts)
    while not folder.is_dir():
        folder = folder.parent
    # What all families share has tests of every op, which the quick tier samples.
    return None if folder in (ROOT / "tests", ROOT / "tests" / "ops") else folder


@functools.cache
def _imports(file: Path) -> set[str]:
    """Return the modules that a file names, in imports and in strings, and their packages."""
    tree = ast.parse(file.read_text())
    named = [*imported_modules(tree, file.stem, False)]
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    named += [x for x in constants if isinstance(x, str) and x.startswith("liger_ops.")]
    # `from package.module import name` imports the module as well.
    return {*named, *(name.rpartition(".")[0] for name in named)}
