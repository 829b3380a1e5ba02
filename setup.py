"""What pyproject.toml cannot say: the packages of the distribution, and the text of its page.

`meta` and `lowering`, folders of the root, are parts of liger_ops, and `packages.find` cannot put a
folder into another package. The README's links name files of the repository. On a registry's page
they have to be absolute.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
FOLDERS = ("meta", "lowering")
PARTS = find_packages(include=[pattern for name in FOLDERS for pattern in (name, f"{name}.*")])


def readme() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"]["Repository"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{repository}/raw/main/", text)
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!https?:|#)", rf"\1{repository}/blob/main/", text)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    packages=[
        *find_packages(include=["liger_ops", "liger_ops.*"]),
        *(f"liger_ops.{name}" for name in PARTS),
    ],
    package_dir={f"liger_ops.{name}": name for name in FOLDERS},
)
