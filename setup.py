"""The packages of the distribution: meta and lowering, folders of the root, are parts of liger_ops.

pyproject.toml has all else. Its `packages.find` cannot put a folder into another package.
"""

from setuptools import find_packages, setup

FOLDERS = ("meta", "lowering")
PARTS = find_packages(include=[pattern for name in FOLDERS for pattern in (name, f"{name}.*")])

setup(
    packages=[
        *find_packages(include=["liger_ops", "liger_ops.*"]),
        *(f"liger_ops.{name}" for name in PARTS),
    ],
    package_dir={f"liger_ops.{name}": name for name in FOLDERS},
)
