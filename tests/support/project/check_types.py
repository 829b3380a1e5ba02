"""Run mypy on the package as it is installed, with meta and lowering in liger_ops, and on the
examples.

    python tests/support/project/check_types.py [ARGUMENT...]    # of mypy

mypy takes a module's name from its folders, and in the repository these two are in the root.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("meta", "lowering")


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "liger_ops")
        shutil.copytree(ROOT / "liger_ops", package)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, package / name)
        examples = shutil.copytree(ROOT / "examples", Path(folder, "examples")).glob("*.py")
        sources = ("liger_ops", *sorted(f"examples/{file.name}" for file in examples))
        files = ("--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache")
        command = [sys.executable, "-m", "mypy", *map(str, files), *sources, *arguments]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    # Name the files as they are in the repository.
    for name in FOLDERS:
        done.stdout = done.stdout.replace(f"liger_ops/{name}/", f"{name}/")
    print(done.stdout, end="")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
