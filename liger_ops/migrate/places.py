"""The places in files where Liger-Kernel is used.

Python is read with `ast`: imports with their aliases, attributes of modules, calls, settings such
as `use_liger_kernel=True`, and strings with the name of a module or a setting. A name is followed
through assignments of it to another name, and not through attributes, arguments or containers.
YAML, JSON, TOML, shell files and lists of requirements are read by lines, for settings.
"""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .table import (
    ROOT,
    NameRow,
    Replacement,
    find,
    modules,
    names_of,
    replacement,
    settings,
    version,
)

LINES = {".yaml", ".yml", ".json", ".toml", ".sh", ".bash", ".cfg", ".ini", ".env"}
# Folders of installed packages, caches and tools.
SKIPPED = {"__pycache__", "node_modules", "site-packages"}
MODULE = re.compile(rf"{ROOT}(\.\w+)*")
# A word with the name, but not a part of a path.
WORD = re.compile(r"(?<![\w/-])[\w-]*liger[\w-]*(?![\w/])", re.IGNORECASE)
OFF = re.compile(r"""["']?\s*[:=\s]\s*["']?false\b""", re.IGNORECASE)
LONGEST = 100


class Place(NamedTuple):
    """A line of a file, what stands there, and its replacement, or the error of the file."""

    file: str
    line: int
    text: str
    here: Replacement | None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.text}" + (f" -> {self.here}" if self.here is not None else "")


def files(path: Path) -> Iterator[Path]:
    """Yield a file, or the files of a folder that are read, in the order of their names."""
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(f for f in folders if f not in SKIPPED and not f.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if is_read(Path(folder, name)))


def is_read(file: Path) -> bool:
    """Return whether files with this name are read."""
    requirements = file.name.startswith("requirements") and file.suffix == ".txt"
    return file.suffix in LINES or file.suffix == ".py" or requirements


def places(file: Path) -> list[Place]:
    """Return the places of a file, or one that names the error if it cannot be read."""
    name = str(file)
    if not is_read(file):
        kinds = " ".join([".py", *sorted(LINES), "requirements*.txt"])
        return [Place(name, 0, f"not read: it is none of {kinds}", None)]
    try:
        source = file.read_bytes()
        if file.suffix != ".py":
            return in_lines(name, source.decode("utf-8"))
        return in_python(name, source)
    except SyntaxError as error:
        return [Place(name, error.lineno or 0, f"not read: {_described(error)}", None)]
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return [Place(name, 0, f"not read: {_described(error)}", None)]


def _described(error: BaseException) -> str:
    text = getattr(error, "msg", None) or getattr(error, "strerror", None) or str(error)
    return f"{type(error).__name__}: {text}"


def in_lines(file: str, text: str) -> list[Place]:
    """Return the settings in a text, without comments that begin with # after a space."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        content = re.split(r"(?:^|\s)#", line)[0]
        for match in WORD.finditer(content):
            row = _setting(match[0].lstrip("-"))
            if row is not None:
                is_off = OFF.match(content, match.end()) is not None
                found.append(Place(file, number, _short(content), _set(row, is_off)))
    return list(dict.fromkeys(found))


def _setting(word: str) -> NameRow | None:
    """Return the row of a setting: `use-liger-kernel` of a command line is use_liger_kernel."""
    spellings = (word, word.replace("-", "_"), word.replace("_", "-"))
    return next((settings()[name] for name in spellings if name in settings()), None)


def _set(row: NameRow, is_off: bool) -> Replacement:
    return Replacement("", ("remove it: it is off",)) if is_off else replacement(row)


def in_python(file: str, source: bytes | str) -> list[Place]:
    """Return the places of a Python source, in its order.

    Raises:
        SyntaxError, ValueError, RecursionError: the source cannot be parsed.
    """
    reader = _PythonReader(file)
    with warnings.catch_warnings():
        # An invalid escape in a string is the project's own affair.
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    reader.visit(tree)
    return sorted(dict.fromkeys(reader.found), key=lambda place: place.line)


class _PythonReader(ast.NodeVisitor):
    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Place] = []
        # The dotted name of each name, or None for one that is something else, by scope.
        self.scopes: list[dict[str, str | None]] = []

    def add(self, node: ast.AST, here: Replacement, text: str = "") -> None:
        line = getattr(node, "lineno", 0)
        self.found.append(Place(self.file, line, _short(text or ast.unparse(node)), here))

    def visit_Module(self, node: ast.Module) -> None:
        self.scoped(node, {})

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.function(node, node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.function(node, node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.function(node, [node.body])

    def function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, body: Sequence[ast.AST]
    ) -> None:
        # Decorators, defaults and annotations are evaluated outside of the function.
        for child in ast.iter_child_nodes(node):
            if child not in body:
                self.visit(child)
        arguments = node.args
        listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        listed += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
        scope = ast.Module(body=list(body), type_ignores=[])  # type: ignore[arg-type]
        self.scoped(scope, {argument.arg: None for argument in listed})

    def scoped(self, node: ast.AST, bound: dict[str, str | None]) -> None:
        """Visit the children of a scope, with the names that its imports and assignments bind.

        An import binds its name in the whole scope: `except ImportError: Norm = None` does not hide
        it.
        """
        scope = dict(bound)
        self.scopes.append(scope)
        statements = list(_statements(node))
        for child in statements:
            scope.update(_imported(child))
        for child in statements:
            for target, value in _assigned(child):
                path = self.path(value)
                if path is not None and scope.get(target) is None:
                    scope[target] = path
                else:
                    scope.setdefault(target, None)
        self.generic_visit(node)
        self.scopes.pop()

    def path(self, node: ast.AST | None) -> str | None:
        """Return the dotted name below `liger_kernel` of an expression, or None."""
        if isinstance(node, ast.Name):
            for scope in reversed(self.scopes):
                if node.id in scope:
                    return scope[node.id]
        elif isinstance(node, ast.Attribute):
            base = self.path(node.value)
            return None if base is None else f"{base}.{node.attr}"
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            values = [a.value for a in node.args if isinstance(a, ast.Constant)]
            texts = [value for value in values if isinstance(value, str)]
            if called in ("import_module", "__import__") and texts and MODULE.fullmatch(texts[0]):
                return texts[0]
            if called == "getattr" and texts and (base := self.path(node.args[0])) is not None:
                return f"{base}.{texts[0]}"
        return None

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if _below(alias.name):
                self.add(node, self.imported(alias.name), f"import {ast.unparse(alias)}")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or not _below(node.module or ""):
            return
        for alias in node.names:
            text = f"from {node.module} import {ast.unparse(alias)}"
            self.add(alias, self.imported(f"{node.module}.{alias.name}"), text)

    def imported(self, path: str) -> Replacement:
        row = find(path)
        if row is not None:
            return Replacement(row.imports, () if row.imports else (row.note,))
        if path in modules() or path.endswith(".*"):
            return Replacement("import liger_ops", ())
        return _unknown(path)

    def visit_Call(self, node: ast.Call) -> None:
        path = self.path(node.func)
        whole = self.path(node)
        if whole is not None and path is None:
            self.named(node, whole, None)
            return
        if path is None:
            self.visit(node.func)
        else:
            self.named(node, path, node)
        for child in (*node.args, *node.keywords):
            self.visit(child)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self.path(node)
        if path is not None:
            self.named(node, path, None)
            return
        self.setting(node, node.attr)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        path = self.path(node)
        if path is not None and isinstance(node.ctx, ast.Load):
            self.named(node, path, None)

    def named(self, node: ast.AST, path: str, call: ast.Call | None) -> None:
        """Add the place of a name of Liger-Kernel, which is called if `call` is given."""
        row = find(path)
        if row is not None:
            # A method of it other than `apply`, such as from_pretrained, has other arguments.
            is_itself = path.rpartition(".")[2] in (row.name, "apply")
            self.add(node, replacement(row, call if is_itself else None))
        elif path not in modules():
            self.add(node, _unknown(path))
        elif isinstance(node, ast.Call):
            self.add(node, Replacement("import liger_ops", ()))

    def visit_Assign(self, node: ast.Assign) -> None:
        """Read a setting that is assigned to an attribute or a key with its value."""
        for target in node.targets:
            is_setting = False
            if isinstance(target, ast.Attribute):
                is_setting = self.setting(target, target.attr, node.value)
            elif isinstance(target, ast.Subscript):
                is_setting = self.text(target.slice, node.value)
            self.visit(getattr(target, "value", target) if is_setting else target)
        self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        self.setting(node, node.arg, node.value)
        self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        self.setting(node, node.arg)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name):
            # A field of the project's own options, whose default says nothing of its use.
            self.setting(node, node.target.id)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None and not self.text(key, value):
                self.visit(key)
            self.visit(value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and MODULE.fullmatch(node.value):
            self.add(node, self.imported(node.value))
        else:
            self.text(node)

    def text(self, node: ast.AST, value: ast.AST | None = None) -> bool:
        """Add the place of a string that is a setting, as a key, or on a command line."""
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            return False
        word, _, given = node.value.lstrip("-").partition("=")
        if given.lower() == "false":
            value = ast.Constant(False)
        return self.setting(node, word.rpartition(".")[2], value)

    def setting(self, node: ast.AST, name: str | None, value: ast.AST | None = None) -> bool:
        """Add the place of a setting with its value; return whether the name is one."""
        row = _setting(name or "")
        if row is None:
            return False
        is_off = isinstance(value, ast.Constant) and value.value is False
        shown = isinstance(value, ast.Constant) and not isinstance(
            node, (ast.keyword, ast.AnnAssign)
        )
        text = f"{ast.unparse(node)}: {ast.unparse(value)}" if shown and value else ""
        self.add(node, _set(row, is_off), text)
        return True


def _below(module: str) -> bool:
    return MODULE.fullmatch(module) is not None


def _unknown(path: str) -> Replacement:
    return Replacement(
        "", (f"`{path}` is not a public name of Liger-Kernel {version()}, but newer or private",)
    )


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope that bind names, without those of the functions in it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _statements(child)


def _imported(node: ast.AST) -> dict[str, str]:
    """Return the names that an import of Liger-Kernel binds, with their dotted names."""
    bound = {}
    if isinstance(node, ast.Import):
        for alias in node.names:
            if _below(alias.name):
                bound[alias.asname or ROOT] = alias.name if alias.asname else ROOT
    elif isinstance(node, ast.ImportFrom) and not node.level and _below(node.module or ""):
        for alias in node.names:
            if alias.name == "*":
                bound |= names_of(node.module or "")
            else:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return bound


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """Yield the names that a node binds, each with its value where that is an expression."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        if isinstance(node.target, ast.Name):
            yield node.target.id, node.value
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, None
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name, None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."
