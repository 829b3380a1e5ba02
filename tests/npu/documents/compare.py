"""Compare the rows about this project's kernels in two copies of docs/reports/npu.md.

    python tests/npu/documents/compare.py RECORDED FOUND

exits with 1 and names each row that differs. Figures of another project's kernels are not compared:
one of them took 96% of the buffer on one machine, and 100% on another.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PEERS = "## Beside "
# Cells of a peer's table that are this project's: op, columns, direction, tile and buffer.
OWN_CELLS = 5


def own(document: str) -> Iterator[str]:
    """Yield the lines of a document, each with its heading, without the figures of peers."""
    heading = ""
    for line in document.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
            of_peers = line.startswith(PEERS)
        elif line.startswith("|") and of_peers:
            line = "|".join(line.split("|")[: OWN_CELLS + 1]) + "|"
        yield f"{heading}: {line}"


def differences(recorded: str, found: str) -> list[str]:
    """List the lines that only one document has; if there are none, say if the order differs."""
    before, after = list(own(recorded)), list(own(found))
    lost, new = Counter(before) - Counter(after), Counter(after) - Counter(before)
    lines = [f"recorded  {line}" for line in lost] + [f"found     {line}" for line in new]
    return lines or ([] if before == after else ["the same lines, in another order"])


def main(recorded: str, found: str) -> int:
    """Print the differences of two files; return 1 if there are any."""
    lines = differences(Path(recorded).read_text(), Path(found).read_text())
    if lines:
        print("npu.md does not say what was found; `make test-npu` has written it anew:")
        print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
