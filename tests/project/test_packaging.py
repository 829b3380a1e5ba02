"""liger_ops works from a wheel, an sdist, an editable installation and a bare checkout.

Each is tried from a folder that holds a user's own `meta.py` and `lowering.py`, the names of two of
this repository's root folders. Nothing is downloaded and nothing of the checkout is written to.
"""

from __future__ import annotations

import configparser
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import liger_ops
from sources import ROOT, module_of, sources

NOT_SOURCE = (
    *(".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__"),
    *("*.egg-info", "build", "dist", "runs"),
)

ENTRY_POINT = "liger_ops.rewrites.backend:liger"

IMPORT_EVERYTHING = """
import importlib, pkgutil, site, sys
site.addsitedir(sys.argv[1])
import liger_ops
print(*[package.__file__ for package in (liger_ops, liger_ops.meta, liger_ops.lowering)])
for package in (liger_ops, liger_ops.meta, liger_ops.lowering):
    print(package.__name__)
    for _, name, _ in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            importlib.import_module(name)
        except ImportError as error:
            # These projects import the module, whose classes are subclasses of theirs.
            tool = name.removeprefix("liger_ops.integrations.")
            if tool not in ("axolotl", "torchtitan") or f"needs {tool}" not in str(error):
                raise
        print(name)
import lowering, meta
assert lowering.OWNER == meta.OWNER == "the user"
"""

IMPORT_SECOND = """
import site, sys
site.addsitedir(sys.argv[1])
sys.path.insert(0, sys.argv[2])
import liger_ops
print(*[package.__file__ for package in (liger_ops, liger_ops.meta, liger_ops.lowering)])
"""

BUILD_EDITABLE = """
import sys
from setuptools import build_meta
print(build_meta.build_editable(sys.argv[1]))
"""


def python(*arguments: str | Path, cwd: Path, path: list[Path] | None = None) -> str:
    """Run Python so that it imports from `path` and this environment's packages alone.

    -S keeps out the .pth files of this environment, and with them an editable liger_ops.
    """
    packages = [
        entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")
    ]
    done = subprocess.run(
        [sys.executable, "-S", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path or []), *packages])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def module_names() -> set[str]:
    """The name of every module of the package, from the source tree."""
    return {module_of(file.relative_to(ROOT)) for file in sources("liger_ops", "meta", "lowering")}


def unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def contents(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the source tree."""
    folder = tmp_path_factory.mktemp("packaging") / "checkout"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    return folder


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    """A wheel that is built from the checkout."""
    out = tmp_path_factory.mktemp("wheel")
    python("-m", "build", "--no-isolation", "--wheel", "--outdir", out, checkout, cwd=out)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sdist_and_its_wheel(checkout, tmp_path_factory) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("sdist")
    python("-m", "build", "--no-isolation", "--outdir", out, checkout, cwd=out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture
def project(tmp_path) -> Path:
    """A user's folder with modules named as our root folders are."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("meta.py", "lowering.py"):
        (folder / name).write_text('OWNER = "the user"\n')
    return folder


def assert_imports(project: Path, site: Path, came_from: Path) -> None:
    """Assert that with `site` as site-packages every module is imported from `came_from`."""
    files, *imported = python("-c", IMPORT_EVERYTHING, site, cwd=project, path=[site]).splitlines()
    folder, *others = [Path(file).parent for file in files.split()]
    assert folder == came_from / "liger_ops"
    at = came_from if (came_from / "meta").exists() else folder
    assert others == [at / "meta", at / "lowering"]
    assert set(imported) == module_names()


def test_every_module_imports_from_the_wheel(wheel, project, tmp_path):
    site = unpack(wheel, tmp_path / "site")
    assert_imports(project, site, site)


def test_every_module_imports_from_an_editable_installation(checkout, project, tmp_path):
    # The wheel that `pip install -e` unpacks into site-packages.
    name = python("-c", BUILD_EDITABLE, tmp_path, cwd=checkout).split()[-1]
    site = unpack(tmp_path / name, tmp_path / "site")
    assert not (site / "liger_ops").exists()
    assert_imports(project, site, checkout)


def test_every_module_imports_from_a_bare_checkout(checkout, project, tmp_path):
    assert_imports(project, checkout, checkout)


def test_a_checkout_takes_nothing_of_an_installed_one(checkout, project, tmp_path):
    """A second checkout, first on the path, beside an editable installation of the other."""
    name = python("-c", BUILD_EDITABLE, tmp_path, cwd=checkout).split()[-1]
    site = unpack(tmp_path / name, tmp_path / "site")
    second = tmp_path / "second"
    shutil.copytree(checkout, second)
    files = python("-c", IMPORT_SECOND, site, second, cwd=project, path=[site]).split()
    assert [Path(file).parent.parent for file in files] == 3 * [second]


def test_the_wheel_has_one_top_level_module(wheel):
    version = liger_ops.__version__
    names = contents(wheel)
    assert {name.split("/")[0] for name in names} == {"liger_ops", f"liger_ops-{version}.dist-info"}
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in names
        if name.endswith(".py")
    }
    assert modules == module_names()
    assert {"liger_ops/py.typed", "liger_ops/migrate/names.toml"} <= set(names)
    assert f"liger_ops-{version}.dist-info/licenses/LICENSE" in names


def test_the_wheel_declares_the_backend(wheel):
    """The wheel has the entry point that `torch.compile(model, backend="liger")` looks for."""
    dist_info = f"liger_ops-{liger_ops.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{dist_info}/entry_points.txt").decode()
    groups = configparser.ConfigParser()
    groups.read_string(text)
    assert dict(groups["torch_dynamo_backends"]) == {"liger": ENTRY_POINT}
    module, name = ENTRY_POINT.split(":")
    assert getattr(importlib.import_module(module), name) is liger_ops.backend


def test_the_wheel_requires_torch_alone(wheel):
    metadata = metadata_of(wheel)
    assert metadata["Version"] == liger_ops.__version__
    lines = metadata.get_all("Requires-Dist")
    assert [r for r in lines if "extra ==" not in r] == ["torch<2.16,>=2.10"]
    extras = {"attention", "cuda", "npu", "transformers", "peft", "bench", "trl", "test", "dev"}
    assert set(metadata.get_all("Provides-Extra")) == extras | {"docs"}


def test_triton_of_each_system_is_required(wheel):
    """torch brings triton on Linux alone; on Windows the package is that of triton-windows."""
    required = {
        system: [r.name for r in requirements(wheel) if r.marker.evaluate(environment)]
        for system, environment in (
            (name, {"extra": "cuda", "platform_system": name, "platform_machine": "x86_64"})
            for name in ("Linux", "Windows", "Darwin")
        )
    }
    assert required == {"Linux": ["triton"], "Windows": ["triton-windows"], "Darwin": []}


def requirements(wheel: Path) -> list[Requirement]:
    lines = metadata_of(wheel).get_all("Requires-Dist")
    return [requirement for requirement in map(Requirement, lines) if requirement.marker]


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"liger_ops-{liger_ops.__version__}.dist-info/METADATA").decode()
    return Parser().parsestr(text)


def test_links_of_the_page_are_absolute(wheel):
    """A registry shows the README, where a link to a file of the repository leads nowhere."""
    page = metadata_of(wheel).get_payload()
    targets = re.findall(r"\]\(([^)]+)\)", page)
    own = [target for target in targets if "/liger-ops/" in target]
    assert len(own) > 10 and not [t for t in targets if not t.startswith(("https://", "#"))]
    files = [re.sub(r".*/(?:blob|raw)/main/([^#]*).*", r"\1", target) for target in own]
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_the_version_and_the_repository_are_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    repository = project["urls"]["Repository"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == liger_ops.__version__
    assert citation["repository-code"] == repository
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text())
    assert recipe["context"]["version"] == liger_ops.__version__
    assert recipe["about"]["repository"] == repository
    needs = [need.replace("torch", "pytorch ") for need in project["dependencies"]]
    assert recipe["requirements"]["run"] == [f"python {project['requires-python']}", *needs]
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(\d.*?)\]", changes, re.MULTILINE)[0] == liger_ops.__version__
    for name in ("SECURITY.md", ".github/ISSUE_TEMPLATE/config.yml", "mkdocs.yml"):
        text = (ROOT / name).read_text()
        assert set(re.findall(r"https://github\.com/[\w-]+/liger-ops", text)) <= {repository}, name


def test_a_bug_report_asks_for_the_machine():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    first = form["body"][0]
    assert "python -m liger_ops" in first["attributes"]["label"]
    assert first["validations"]["required"] is True


RESERVED = {"aux", "con", "nul", "prn", *(f"{d}{n}" for d in ("com", "lpt") for n in range(1, 10))}


def test_a_checkout_is_whole_on_windows():
    """Git checks out links as text files there, and other systems' names not at all."""
    listed = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    modes = {line.split("\t")[1]: line.split()[0] for line in listed}
    assert len(modes) > 500 and set(modes.values()) <= {"100644", "100755"}
    assert len({path.lower() for path in modes}) == len(modes)
    parts = {part for path in modes for part in path.lower().split("/")}
    assert not {part.split(".")[0] for part in parts} & RESERVED
    assert not [part for part in parts if re.search(r'[<>:"\\|?*]|[. ]$', part)]


# PyTorch's own modules are imported first: on Windows they are other files.
AS_ON_WINDOWS = """
import platform, sys
import torch, torch._dynamo

sys.path.insert(0, sys.argv[1])
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
sys.platform, platform.system = "win32", lambda: "Windows"
import liger_ops
x = torch.randn(3, 5, requires_grad=True)
liger_ops.rms_norm(x, torch.ones(5)).sum().backward()
assert x.grad is not None
assert liger_ops.backend and liger_ops.fuse(torch.nn.LayerNorm(8)).counts()
from liger_ops.environment import describe
report = describe()
print(report["versions"]["triton-windows"], len(report["ops"]) - len(report["kernels"]["cuda"]))
"""


def test_it_imports_as_on_windows(tmp_path):
    """Python's platform is simulated, and its modules for POSIX are missing. Nothing has run on
    Windows. The package triton of this environment stands for that of triton-windows."""
    distribution = tmp_path / "triton_windows-3.8.0.dist-info"
    distribution.mkdir()
    distribution.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: triton-windows\nVersion: 3.8.0\n"
    )
    out = python("-c", AS_ON_WINDOWS, tmp_path, cwd=tmp_path, path=[ROOT])
    assert out.split() == ["3.8.0", "0"]


def test_the_sdist_builds_the_same_wheel(wheel, sdist_and_its_wheel):
    sdist, rebuilt = sdist_and_its_wheel
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
    assert contents(rebuilt) == contents(wheel)
