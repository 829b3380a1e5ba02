"""The repository's Python files, their modules, and what they import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]


def sources(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def module_of(file: Path) -> str:
    """Return the name of a source's module; `file` is a path from the root."""
    parts = file.with_suffix("").parts
    parts = parts if parts[0] == "liger_ops" else ("liger_ops", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Yield the absolute name of every import; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")
            parents = parents[: len(parents) - node.level + is_package] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
