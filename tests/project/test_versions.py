"""The README, pyproject.toml, .ci/setup and versions.md name the same versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

import versions_report
from versions_report import ROOT, VERSIONS

FIRST, *_, LAST = VERSIONS


def text(name: str) -> str:
    return (ROOT / name).read_text()


def test_bounds_are_the_versions_that_are_tested() -> None:
    major, minor = LAST.split(".")
    bound = f"torch>={FIRST},<{major}.{int(minor) + 1}"
    assert re.findall(r'^dependencies = \["(.*)"\]$', text("pyproject.toml"), re.M) == [bound]
    assert re.findall(r"needs torch (\S+) to (\S+) and nothing else", text("README.md")) == [
        (FIRST, LAST)
    ]


def test_setup_makes_an_environment_of_a_version_that_is_tested() -> None:
    (version,) = re.findall(r"^torch_version=(.*)$", text(".ci/setup"), re.M)
    assert version.rpartition(".")[0] in VERSIONS
    (least,) = re.findall(r"split.*< \((\d+), (\d+)\)", text(".ci/setup"))
    assert ".".join(least) == FIRST
    (python,) = re.findall(r'^requires-python = ">=(.*)"$', text("pyproject.toml"), re.M)
    named = re.findall(r"Python (?:of version )?(\d\.\d+) or newer", text(".ci/setup"))
    assert {*named} == {python}
    assert f"Python {python} or newer" in text("README.md")


def test_every_version_is_in_the_document() -> None:
    rows, models = versions_report.recorded(), versions_report.recorded_models()
    assert [*rows] == [*VERSIONS]
    assert versions_report.DOCUMENT.read_text() == versions_report.document(rows, models)
    failed = 1 + len(versions_report.PACKAGES) + versions_report.OUTCOMES.index("failed")
    assert [row.split("|")[failed].strip() for row in rows.values()] == ["0"] * len(rows)
    wrong = 3 + versions_report.COUNTS.index("wrong or failed")
    found = {row.split()[1]: int(row.split("|")[wrong]) for row in models}
    # The document says which these are.
    assert {name: count for name, count in found.items() if count} == {"5.17.0": 2, "5.20.2": 2}


def lower_bounds() -> dict[str, Version]:
    """Package -> the oldest release that pyproject.toml accepts, where it names one."""
    project = tomllib.loads(text("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    given = [*project["dependencies"], *(one for name in extras for one in extras[name])]
    return {
        requirement.name: Version(bound.version)
        for requirement in map(Requirement, given)
        for bound in requirement.specifier
        if bound.operator == ">="
    }


def test_the_oldest_row_has_the_lower_bounds() -> None:
    bounds = lower_bounds()
    tested = versions_report.recorded()[FIRST].strip("| ").split(" | ")
    packages = dict(zip(versions_report.PACKAGES, map(Version, tested), strict=False))
    assert packages == {name: bounds[name] for name in packages}


def test_every_model_was_trained_with_the_oldest_and_a_newer_transformers() -> None:
    trained = [Version(row.split()[1]) for row in versions_report.recorded_models()]
    assert trained[0] == lower_bounds()["transformers"] and len(trained) > 1


def test_this_environment_is_of_a_version_that_is_tested() -> None:
    assert ".".join(torch.__version__.split(".")[:2]) in VERSIONS


@pytest.mark.parametrize(("failures", "errors"), [(0, 0), (2, 1)])
def test_outcomes_are_counted(tmp_path: Path, failures: int, errors: int) -> None:
    suite = {"tests": "9", "failures": str(failures), "errors": str(errors), "skipped": "3"}
    root = ElementTree.Element("testsuites")
    ElementTree.SubElement(root, "testsuite", suite)
    file = tmp_path / "results.xml"
    ElementTree.ElementTree(root).write(file)
    failed = failures + errors
    assert versions_report.counted(file) == {
        "passed": 6 - failed, "failed": failed, "skipped": 3
    }  # fmt: skip
