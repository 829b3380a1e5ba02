"""Invalidate PyTorch's compile caches if this package changes."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch.compiler.config

from .checkout import FOLDERS


@functools.cache
def package_hash() -> str:
    """Return a hash of the names and contents of all source files of the package."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, *map(Path, FOLDERS.values())):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.relative_to(folder).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def tag_compile_caches() -> None:
    """Put the package's hash into the key of PyTorch's compile caches.

    The key does not cover the autograd formulas of custom ops: without the tag, a cache written by
    another version of this package would serve that version's gradients.
    """
    config = torch.compiler.config
    tags = [tag for tag in config.cache_key_tag.split(";") if tag and "liger_ops=" not in tag]
    config.cache_key_tag = ";".join([*tags, f"liger_ops={package_hash()}"])
