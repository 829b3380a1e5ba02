"""`python -m liger_ops.hub build DIR`: write a repository for the kernels hub."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .build import REPOSITORY, write

DESCRIPTION = """\
Write a repository for the kernels hub of the package `kernels`: the ops and layers that models of
transformers use, with their kernels, as a package that needs torch and triton alone. docs/hub.md
says how to use it.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m liger_ops.hub", description=DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    build = commands.add_parser("build", help="write the repository", description=DESCRIPTION)
    build.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder, or a build")
    build.add_argument(
        "--repo-id", default=REPOSITORY, help="its name on the hub (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        ids = write(options.folder, options.repo_id)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for variant, id_ in ids.items():
        print(f"{options.folder}/build/{variant}: {id_}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
