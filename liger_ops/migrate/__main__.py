"""`python -m liger_ops.migrate PATH...`: list the places of a project that use Liger-Kernel."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .places import files, places
from .table import version

DESCRIPTION = f"""\
List the places in files and folders that use Liger-Kernel, each with what replaces it:

  file:line: what stands there -> the code that replaces it  # what differs

Nothing is changed, and Liger-Kernel need not be installed. Python is parsed, and YAML, JSON, TOML,
shell files and requirements*.txt are read by lines, for settings such as use_liger_kernel. Names
are those of Liger-Kernel {version()}; docs/from-liger-kernel.md has a table of them. Notebooks are
not read.

exit status: 0; 2 for wrong arguments
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m liger_ops.migrate", description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file or a folder")
    paths = parser.parse_args(arguments).paths
    if missing := [str(path) for path in paths if not path.exists()]:
        parser.error(f"no such file or folder: {', '.join(missing)}")
    read = list(dict.fromkeys(file for path in paths for file in files(path)))
    used = unread = count = 0
    for file in read:
        found = places(file)
        for place in found:
            print(place)
        unread += any(place.here is None for place in found)
        listed = sum(place.here is not None for place in found)
        used, count = used + bool(listed), count + listed
    summary = f"{count} places in {used} of {len(read) - unread} files that were read"
    print(summary + (f"; {unread} could not be read" if unread else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
