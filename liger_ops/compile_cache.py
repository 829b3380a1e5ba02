"""Invalidate PyTorch's compile caches if this package changes."""

from __future__ import annotations

import functools
import glob
import hashlib
import os

import torch.compiler.config


@functools.cache
def package_hash() -> str:
    """Return a hash of the names and contents of all source files of the package."""
    root = os.path.dirname(__file__)
    digest = hashlib.sha256()
    # Path.rglob would not follow the links to meta and lowering.
    for name in sorted(glob.glob("**/*.py", root_dir=root, recursive=True)):
        digest.update(name.encode())
        with open(os.path.join(root, name), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()[:16]


def tag_compile_caches() -> None:
    """Put the package's hash into the key of PyTorch's compile caches.

    The key does not cover the autograd formulas of custom ops: without the tag, a cache written by
    another version of this package would serve that version's gradients.
    """
    config = torch.compiler.config
    tags = [tag for tag in config.cache_key_tag.split(";") if tag and "liger_ops=" not in tag]
    config.cache_key_tag = ";".join([*tags, f"liger_ops={package_hash()}"])
