"""Write the tables of docs/from-liger-kernel.md from `liger_ops/migrate/names.toml`.

    python tests/support/project/liger_kernel_page.py

A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`, and what else is in the
page stays as it is.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "from-liger-kernel.md"
TABLE = re.compile(r"(<!-- table: (\w+) -->\n)(?:(?!<!-- end -->).)*(<!-- end -->)", re.DOTALL)


def written(page: str) -> str:
    """Return the page with its tables written anew."""
    from liger_ops.migrate.table import markdown

    return TABLE.sub(lambda match: f"{match[1]}\n{markdown(match[2])}\n\n{match[3]}", page)


def tables(page: str) -> list[str]:
    """Return the names of the tables of a page."""
    return [match[2] for match in TABLE.finditer(page)]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(written(PAGE.read_text()))
