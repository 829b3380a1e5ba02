"""Write docs/reports/versions.md: the tests with every version of torch that is supported.

    python tests/support/versions_report.py [--python 2.15=/path/to/python ...] [VERSION ...]

Each version has an environment of its own, `.venv-VERSION`, which `.ci/setup` makes and which is
removed after the tests. `--python` names an environment that is there already. The rows of other
versions stay as they are. tests/project/test_versions.py compares the document, the README and
pyproject.toml with `VERSIONS`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reports" / "versions.md"

# What an environment needs beside its torch, which brings its triton.
VERSIONS: dict[str, tuple[str, ...]] = {
    # The interpreter of triton 3.6 converts arrays of one dimension to numbers, which numpy 2.4
    # refuses.
    "2.11": ("numpy<2.4",),
    "2.13": (),
    "2.14": (),
    "2.15": (),
}
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "numpy")
OUTCOMES = ("passed", "failed", "skipped")
TESTS = ("-m", "quick")

INTRODUCTION = """\
# Versions of PyTorch

`make test-versions` wrote this table: it makes an environment for each torch, with the newest
releases of all other packages, and runs `pytest {tests}` in it on a CPU. pyproject.toml accepts
these versions of torch and no others. CI runs every test with torch 2.13, and these with the newest
torch (`make test-newest`). An environment that is there already is tested with
`make test-versions ARGS="2.15 --python 2.15=/path/to/python"`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"default: {[*VERSIONS]}")
    parser.add_argument("--python", action="append", default=[], metavar="VERSION=PATH")
    given = parser.parse_args()
    there = dict(one.split("=", 1) for one in given.python)
    rows = recorded()
    failed = 0
    for version in given.versions or VERSIONS:
        python = there.get(version) or environment(version)
        counts = tested(python)
        failed += counts["failed"]
        rows[version] = row(python, counts)
        DOCUMENT.write_text(document(rows))
        if version not in there:
            shutil.rmtree(ROOT / f".venv-{version}")
    sys.exit(failed > 0)


def environment(version: str) -> str:
    folder = f".venv-{version}"
    subprocess.run(
        [".ci/setup", folder, f"torch=={version}.*", *VERSIONS[version]], cwd=ROOT, check=True
    )
    return str(ROOT / folder / "bin" / "python")


def tested(python: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        subprocess.run(
            [python, "-m", "pytest", "-n", "auto", "--maxprocesses", "8", "--dist", "worksteal",
             *TESTS, f"--junitxml={results}"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        return counted(results)


def counted(results: Path) -> dict[str, int]:
    (suite,) = ElementTree.parse(results).getroot().iter("testsuite")
    tests, failures, errors, skipped = (
        int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return {"passed": tests - failed - skipped, "failed": failed, "skipped": skipped}


def row(python: str, counts: dict[str, int]) -> str:
    code = f"from importlib.metadata import version as v; print(*map(v, {PACKAGES}))"
    packages = subprocess.check_output([python, "-c", code], text=True).split()
    numbers = (str(counts[name]) for name in OUTCOMES)
    return f"| {' | '.join((*packages, *numbers, str(datetime.date.today())))} |"


def recorded() -> dict[str, str]:
    """The rows of the document, by the version of torch without its last part."""
    lines = DOCUMENT.read_text().splitlines() if DOCUMENT.exists() else []
    rows = (line for line in lines if line.startswith("| 2."))
    return {".".join(line.split()[1].split(".")[:2]): line for line in rows}


def document(rows: dict[str, str]) -> str:
    names = (*PACKAGES, *OUTCOMES, "date")
    table = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    table += [rows[version] for version in VERSIONS if version in rows]
    return INTRODUCTION.format(tests=" ".join(TESTS)) + "\n" + "\n".join(table) + "\n"


if __name__ == "__main__":
    main()
