"""Whether two copies of docs/npu.md say the same of the kernels here.

    python tests/npu/compare.py RECORDED FOUND

exits with 1 and names each row that differs. What a row says of another project's kernels is left
out: one took 96% of the buffer on one machine, and 100% on another.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PEERS = "## Beside "
# In the tables of peers: the op, its columns, the direction, and the tile and the buffer here.
OWN_CELLS = 5


def own(document: str) -> Iterator[str]:
    """The lines of a document, each after its heading, without the figures of peers."""
    heading = ""
    for line in document.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
            of_peers = line.startswith(PEERS)
        elif line.startswith("|") and of_peers:
            line = "|".join(line.split("|")[: OWN_CELLS + 1]) + "|"
        yield f"{heading}: {line}"


def differences(recorded: str, found: str) -> list[str]:
    """The lines that only one of two documents has, or their order where they have the same."""
    before, after = list(own(recorded)), list(own(found))
    lost, new = Counter(before) - Counter(after), Counter(after) - Counter(before)
    lines = [f"recorded  {line}" for line in lost] + [f"found     {line}" for line in new]
    return lines or ([] if before == after else ["the same lines, in another order"])


def main(recorded: str, found: str) -> int:
    lines = differences(Path(recorded).read_text(), Path(found).read_text())
    if lines:
        print("docs/npu.md does not say what was found; `make test-npu` has written it anew:")
        print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
