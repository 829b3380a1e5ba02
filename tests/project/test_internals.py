"""docs/internals lists its notes and the mechanisms of the package, each with its file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sources import ROOT

FOLDER = ROOT / "docs/internals"
INDEX = (FOLDER / "README.md").read_text()
# More are more than a maintainer holds in the head: merge two before adding another.
MOST_MECHANISMS = 128


def mechanisms() -> list[tuple[str, str]]:
    return re.findall(r"^\| (.*) \| `([\w./]+)` \|$", INDEX, re.MULTILINE)


@pytest.mark.quick
def test_every_note_is_listed() -> None:
    notes = {file.name for file in FOLDER.glob("*.md")} - {"README.md"}
    assert set(re.findall(r"^\| \[(\w+\.md)\]", INDEX, re.MULTILINE)) == notes
    assert len(notes) >= 7


@pytest.mark.quick
def test_mechanisms_are_in_their_files() -> None:
    rows = mechanisms()
    names = [name for name, _ in rows]
    assert 100 < len(rows) <= MOST_MECHANISMS and len(set(names)) == len(names)
    assert [file for _, file in rows if not (ROOT / file).is_file()] == []


def examples() -> list[tuple[str, str, str]]:
    """Return the name of each note that has a program, the program, and its output."""
    block = re.compile(r"^```python\n(.*?)^```$.*?^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = [(file.name, block.search(file.read_text())) for file in sorted(FOLDER.glob("*.md"))]
    return [(name, match[1], match[2]) for name, match in found if match is not None]


# One process imports everything, and forks for each program.
RUN = """
import os, sys, traceback
import torch._dynamo, transformers
import liger_ops.fusion, liger_ops.rewrites.backend

for file in sys.argv[1:]:
    if os.fork() == 0:
        try:
            exec(compile(open(file).read(), file, "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.wait()
    print("end of", file, flush=True)
"""


def test_examples_print_what_their_notes_show(tmp_path: Path) -> None:
    expected = ""
    for name, program, printed in examples():
        file = tmp_path / f"{name}.py"
        file.write_text(program)
        expected += f"{printed}end of {file}\n"
    run = subprocess.run(
        [sys.executable, "-c", RUN, *sorted(tmp_path.glob("*.py"))],
        capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LIGER_OPS_STRICT": ""},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert expected.count("end of") >= 6
    assert run.stdout.splitlines() == expected.splitlines()
