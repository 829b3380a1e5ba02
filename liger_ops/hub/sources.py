"""Find the modules that a repository for the kernels hub contains."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

from .. import library, ops
from ..checkout import FOLDERS

PACKAGE = __package__.partition(".")[0]
# What the repository imports first, and the code of its kernels that is imported by name.
ROOTS = (
    f"{PACKAGE}.hub.package",
    *(f"{PACKAGE}.lowering.{device}" for device in library.DEVICES),
    f"{PACKAGE}.lowering.cuda.embedded",
)


def modules() -> dict[str, Path]:
    """Return the modules and packages of a repository, by name, with their files: ROOTS, all that
    they import, and the checks and kernels of every op among these."""
    found: dict[str, Path] = {}
    left = list(ROOTS)
    while left:
        name = left.pop()
        file = file_of(name)
        if name in found or name == PACKAGE or file is None:
            continue
        found[name] = file
        tree = ast.parse(file.read_text())
        is_package = file.stem == "__init__"
        left += [name.rpartition(".")[0], *_imports(name, is_package, tree)]
        left += [*_parts_of_op(name, tree), *_ops_of_kernels(tree)]
    return dict(sorted(found.items()))


def file_of(module: str) -> Path | None:
    """Return the file of a module of this package, or None if there is none. Nothing is imported: a
    module of kernels would import Triton."""
    root = ".".join(module.split(".")[:2])
    base = Path(FOLDERS.get(root, Path(__file__).parents[1] / root.rpartition(".")[2]))
    path = base.joinpath(*module.split(".")[2:])
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in candidates if file.is_file()), None)


def _imports(module: str, is_package: bool, tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module's relative imports may import as modules."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield base
            yield from (f"{base}.{name.name}" for name in node.names)


def _parts_of_op(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield the modules that check and run the op that a module defines, if it defines one. Kernels
    are in a file of the op's name; those of activations are in one file."""
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    match module.split(".")[1:]:
        case "ops", family, op if op in defined:
            yield f"{PACKAGE}.meta.{family}"
            for device in library.DEVICES:
                folder = f"{PACKAGE}.lowering.{device}.{family}"
                yield f"{folder}.{op if file_of(f'{folder}.{op}') else family}"


def _ops_of_kernels(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of the ops for which a module registers kernels by their names."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                ast.Attribute(ast.Name("library"), "kernel"), [ast.Constant(str(name)), *_]
            ):
                op = name.removesuffix("_backward").removesuffix("_forward")
                for file in Path(ops.__path__[0]).rglob(f"{op}.py"):
                    yield f"{ops.__name__}.{file.parent.name}.{op}"
