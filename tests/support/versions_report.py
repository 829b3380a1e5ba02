"""Write docs/reports/versions.md: the tests with every torch that is supported, and the training of
every model with several versions of transformers.

    python tests/support/versions_report.py [--python 2.15=/path/to/python ...] [VERSION ...]
    python tests/support/versions_report.py --models DOCUMENT

Each version has an environment of its own, `.venv-VERSION`, which `.ci/setup` makes and which is
removed after the tests. `--python` names an environment that is there already. `--models` reads the
counts of a document that `trained_models_report.py --document` wrote, and runs nothing. The rows of
other versions stay as they are. tests/project/test_versions.py compares the document, the README
and pyproject.toml with `VERSIONS`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reports" / "versions.md"

# Version of torch -> the arguments of `uv pip install` that make its environment. The oldest has
# the lower bounds of pyproject.toml.
VERSIONS: dict[str, tuple[str, ...]] = {
    "2.10": ("--resolution", "lowest-direct"),
    # Its triton's interpreter fails with numpy 2.4.
    "2.11": ("torch==2.11.*", "--resolution", "lowest-direct"),
    "2.13": ("torch==2.13.*",),
    "2.14": ("torch==2.14.*",),
    "2.15": ("torch==2.15.*",),
}
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "numpy")
OUTCOMES = ("passed", "failed", "skipped")
COUNTS = ("models", "backend equal", "`fuse` equal", "LoRA equal", "wrong or failed")
TESTS = ("-m", "quick")

INTRODUCTION = """\
# Versions

`make test-versions` wrote this table: it makes an environment for each torch and runs
`pytest {tests}` in it on a CPU. The first row has the lower bounds of pyproject.toml, and so has
the second but for torch; the others have the newest releases of all other packages.
pyproject.toml accepts no older and no newer torch. CI runs every test with torch 2.13, and these
with the newest releases (`make test-newest`) and with the lower bounds (`make test-oldest`). An
environment that is there already is tested with
`make test-versions ARGS="2.15 --python 2.15=/path/to/python"`.
"""
MODELS = """
## Every model that can be trained

The commands `python tests/support/trained_models_report.py --document /tmp/models.md` and
`python tests/support/versions_report.py --models /tmp/models.md` wrote a row, which tells how many
of all models were run. [models.md](models.md) says how models are trained and compared, and has
the results of each model. "equal", of the backend, is in all three ways, and of `fuse` and of a
LoRA for all batches; a model that is not equal cannot be trained, compiled or verified so, with or
without this package, or is left whole.

The two of 5.17 and of 5.20 are MarianMT and Wav2Vec2ForCTC, fused: gradients in float32 that are
small beside the others differ by 1e-5 to 1e-4 from the model's, more than twice its own error, and
agree in float64 to 3e-13.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"default: {[*VERSIONS]}")
    parser.add_argument("--python", action="append", default=[], metavar="VERSION=PATH")
    parser.add_argument("--models", type=Path, metavar="DOCUMENT", help="read the counts of models")
    arguments = parser.parse_args()
    if arguments.models is not None:
        return add_models(arguments.models)
    pythons = dict(pair.split("=", 1) for pair in arguments.python)
    rows = recorded()
    failed = 0
    for version in arguments.versions or VERSIONS:
        python = pythons.get(version) or environment(version)
        counts = tested(python)
        failed += counts["failed"]
        rows[version] = row(python, counts)
        DOCUMENT.write_text(document(rows, recorded_models()))
        if version not in pythons:
            shutil.rmtree(ROOT / f".venv-{version}")
    sys.exit(failed > 0)


def environment(version: str) -> str:
    folder = f".venv-{version}"
    subprocess.run([".ci/setup", folder, *VERSIONS[version]], cwd=ROOT, check=True)
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
    """Read the rows of the document, by the version of torch without its last number."""
    lines = DOCUMENT.read_text().splitlines() if DOCUMENT.exists() else []
    rows = (line for line in lines if line.startswith("| 2."))
    return {".".join(line.split()[1].split(".")[:2]): line for line in rows}


def recorded_models() -> list[str]:
    """Read the rows of models, the oldest transformers first."""
    lines = DOCUMENT.read_text().splitlines() if DOCUMENT.exists() else []
    return [line for line in lines if line.startswith("| 5.")]


def add_models(path: Path) -> None:
    """Add a row with the counts of a document of `trained_models_report.py`."""
    import trained_models_report as models

    heading = r"^torch (\S+), transformers (\S+)\.$"
    ((torch, transformers),) = re.findall(heading, path.read_text(), re.M)
    (of,) = re.findall(r"^\d+ of (\d+) models were trained", path.read_text(), re.M)
    known = [row.results for row in models.rows(path).values()]
    backend = len(models.MODES)
    adapted = [ways[backend + 1] for ways in known if ways[backend + 1] != models.NOT_RUN]
    counts = {
        "models": f"{len(known)} of {of}",
        "backend equal": sum(set(ways[:backend]) == {models.EQUAL} for ways in known),
        "`fuse` equal": sum(ways[backend] == models.EQUAL for ways in known),
        "LoRA equal": adapted.count(models.EQUAL) if adapted else models.NOT_RUN,
        "wrong or failed": sum("**" in " ".join(ways) for ways in known),
    }
    assert tuple(counts) == COUNTS
    new = [transformers, torch, *map(str, counts.values()), str(datetime.date.today())]
    others = [line for line in recorded_models() if line.split()[1] != transformers]
    rows = sorted([*others, f"| {' | '.join(new)} |"], key=lambda row: row.split()[1].split("."))
    DOCUMENT.write_text(document(recorded(), rows))


def document(rows: dict[str, str], models: Sequence[str]) -> str:
    tests = [rows[version] for version in VERSIONS if version in rows]
    return (
        INTRODUCTION.format(tests=" ".join(TESTS))
        + table((*PACKAGES, *OUTCOMES, "date"), tests)
        + MODELS
        + table(("transformers", "torch", *COUNTS, "date"), models)
    )


def table(names: Sequence[str], rows: Sequence[str]) -> str:
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|", *rows]
    return "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
