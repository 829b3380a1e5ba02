"""Importing this makes the modules of all folders of `tests/support` importable by their names."""

from __future__ import annotations

import sys
from pathlib import Path

SUPPORT = Path(__file__).parent

sys.path[1:1] = [str(folder) for folder in sorted(SUPPORT.glob("*/"))]
