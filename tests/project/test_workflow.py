"""The workflow of a public forge runs every part of .ci/run, and the versions that it names."""

from __future__ import annotations

import re
import tomllib

import yaml

from sources import ROOT

JOBS = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
SITE = yaml.safe_load((ROOT / ".github/workflows/docs.yml").read_text())["jobs"]


def test_each_part_of_the_ci_is_a_job() -> None:
    parts = re.findall(r"^(?:\w+=\w+ )?make ([\w-]+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert len(parts) >= 6 and JOBS["part"]["strategy"]["matrix"]["target"] == parts


def test_supported_versions_are_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {c.split(" :: ")[-1] for c in project["classifiers"] if ":: Python :: 3." in c}
    first = {step["with"]["python-version"] for step in JOBS["part"]["steps"] if "with" in step}
    assert first | set(JOBS["python"]["strategy"]["matrix"]["python"]) == named
    # The oldest, the newest and .ci/setup's are parts of the CI.
    lowest, highest = map(int, re.findall(r"2\.(\d+)", project["dependencies"][0]))
    (default,) = re.findall(r"^torch_version=2\.(\d+)", (ROOT / ".ci/setup").read_text(), re.M)
    others = {f"2.{minor}" for minor in range(lowest + 1, highest - 1)} - {f"2.{default}"}
    assert set(JOBS["torch"]["strategy"]["matrix"]["torch"]) == others


def test_every_command_is_a_target_or_a_file() -> None:
    targets = set(re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for job in (*JOBS.values(), *SITE.values()):
        for command in (step["run"] for step in job["steps"] if "run" in step):
            for target in re.findall(r"make ([\w-]+)", command):
                assert target in targets
            for file in re.findall(r"(?<![\w/])((?:tests|\.ci)/[\w./-]+)", command):
                assert (ROOT / file).exists()
