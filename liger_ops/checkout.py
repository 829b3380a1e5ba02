"""Find liger_ops.meta and liger_ops.lowering in a checkout.

There they are folders of the repository's root. An installation has them inside the package, and
Python finds them itself.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parent
# Module -> its folder in the root.
FOLDERS = {
    f"{__package__}.{name}": str(_PACKAGE.parent / name)
    for name in ("meta", "lowering")
    if not (_PACKAGE / name).is_dir()
}


class RootFolders:
    """A finder of the modules of FOLDERS, for `sys.meta_path`."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in FOLDERS:
            return None
        folder = FOLDERS[name]
        return spec_from_file_location(
            name, f"{folder}/__init__.py", submodule_search_locations=[folder]
        )


if FOLDERS:
    # First: the finder of an editable installation would find the folders of another checkout.
    sys.meta_path.insert(0, RootFolders)
