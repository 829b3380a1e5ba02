"""Count what final code does: the vector instructions that it issues, and the bytes that it moves
between global memory and the Unified Buffer.

The scalar part of the code, its bounds, offsets and conditions, is evaluated with the arguments of
the launch, for every program of the grid. A vector instruction works on 256 bytes: an operation on
a longer buffer counts once for each 256 bytes. A condition that depends on data, such as whether a
token is ignored, takes the branch with more instructions.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from launches import Launch
from plan import BITS

VECTOR_BYTES = 256

_NAME = re.compile(r"%[\w#]+")
_TYPED = re.compile(r"memref<((?:[\d?]+x)*)(\w+)")
_CALL = re.compile(r"(?:func\.)?call @(\w+)\((.*?)\) : |hivm\.hir\.(v\w+|load|store|copy)\b(.*)")
_FOR = re.compile(
    r"scf\.for (%\w+) = (%[\w#]+) to (%[\w#]+) step (%[\w#]+)(?:.*?iter_args\((.*?)\))?"
)
_CONSTANT = re.compile(r"arith\.constant (true|false|-?\d+)\b(?!\.)")
_MAP = re.compile(r"^(#map\d*) = affine_map<\((.*?)\)(?:\[(.*?)\])? -> \((.*)\)>", re.MULTILINE)
_AFFINE = re.compile(r"affine\.(apply|min|max) (#map\d*)\((.*?)\)(?:\[(.*?)\])?")
_VIEW = re.compile(
    r"memref\.(subview|reinterpret_cast|cast|collapse_shape|expand_shape|extract_strided_metadata)"
    r" (%[\w#]+)"
)

_INTEGERS: dict[str, Callable[[int, int], int]] = {
    "addi": operator.add,
    "subi": operator.sub,
    "muli": operator.mul,
    "divsi": lambda a, b: int(a / b) if abs(a) < 2**52 else a // b,
    "divui": operator.floordiv,
    "floordivsi": operator.floordiv,
    "ceildivsi": lambda a, b: -(-a // b),
    "remsi": lambda a, b: int(math.fmod(a, b)),
    "remui": operator.mod,
    "minsi": min,
    "maxsi": max,
    "minui": min,
    "maxui": max,
    "andi": operator.and_,
    "ori": operator.or_,
    "xori": operator.xor,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "slt": operator.lt,
    "sle": operator.le,
    "sgt": operator.gt,
    "sge": operator.ge,
    "ult": operator.lt,
    "ule": operator.le,
    "ugt": operator.gt,
    "uge": operator.ge,
}


@dataclass(frozen=True, order=True)
class Counts:
    """Vector instructions, and bytes moved between global memory and the Unified Buffer."""

    instructions: int = 0
    bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.instructions + other.instructions, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Counts:
        return Counts(self.instructions * times, self.bytes * times)


@dataclass
class Operation:
    """A line of code, with the operations of its regions."""

    line: str
    regions: list[list[Operation]] = field(default_factory=list)


def count(launch: Launch, code: str) -> Counts:
    """Count the instructions and bytes of all programs of a launch by its final code."""
    return functools.reduce(operator.add, by_program(launch, code))


def by_program(launch: Launch, code: str) -> list[Counts]:
    """Count the instructions and bytes of each program of a launch by its final code."""
    kernel = _Kernel(code)
    return [kernel.run(launch, program) for program in range(math.prod(launch.grid))]


class _Kernel:
    """The final code of a kernel, evaluated for one program at a time.

    `values` maps a name in the code to an integer, to a buffer as (elements, bits of each), or to
    None if it depends on data.
    """

    def __init__(self, code: str) -> None:
        self.maps = {name: _affine(*parts) for name, *parts in _MAP.findall(code)}
        lines = [line.strip() for line in code.splitlines()]
        # The kernel itself is the last function with a body.
        start = max(
            i for i, line in enumerate(lines) if line.startswith("func.func @") and line[-1] == "{"
        )
        head = lines[start]
        self.parameters = re.findall(r"(%arg\d+): ([^{,]+)", head)
        self.body, _ = _parsed(lines, start + 1)

    def run(self, launch: Launch, program: int) -> Counts:
        # Three pointers come first: two to workspace, and one for synchronisation.
        arguments = [None] * 3 + list(launch.arguments) + [*launch.grid, 1, 1][:3]
        values = {}
        for (name, type), value in zip(self.parameters, arguments, strict=True):
            values[name] = _size(type) if type.startswith("memref") else value
        return self._region(self.body, values, program)[0]

    def _region(
        self, region: Sequence[Operation], values: dict[str, Any], program: int
    ) -> tuple[Counts, list[str]]:
        """Count a region; also return the names of the values that it yields."""
        total = Counts()
        yielded: list[str] = []
        for operation in region:
            line = operation.line
            results, _, right = line.partition(" = ") if line[0] == "%" else ("", "", line)
            if right.startswith("scf.for"):
                total += self._loop(operation, right, results, values, program)
            elif right.startswith("scf.if"):
                condition = values[_NAME.search(right)[0]]
                taken = operation.regions
                # A condition on data, None, takes the branch with more instructions.
                if condition is not None:
                    taken = taken[:1] if condition else taken[1:]
                branches = [self._region(inside, values, program) for inside in taken]
                if branches:
                    counts, outputs = max(branches, key=lambda branch: branch[0])
                    total += counts
                    self._bind(results, [values.get(name) for name in outputs], values)
            elif right.startswith("scf.yield"):
                yielded = _NAME.findall(right.partition(":")[0])
            elif right.startswith("scf."):
                raise ValueError(f"count: cannot be evaluated: {line}")
            elif match := _CALL.match(right):
                total += _of_call(match[1] or match[3], match[2] or match[4], values)
            elif results:
                # Of several results, a buffer comes first, and its offset, sizes and strides after.
                values[results.partition(",")[0]] = self._value(right, values, program)
        return total, yielded

    def _bind(self, results: str, outputs: Sequence[Any], values: dict[str, Any]) -> None:
        name, _, count = results.partition(":")
        for i, output in enumerate(outputs):
            values[f"{name}#{i}" if count else name] = output

    def _loop(
        self, loop: Operation, right: str, results: str, values: dict[str, Any], program: int
    ) -> Counts:
        index, *bounds, carried = _FOR.match(right).groups()
        first, end, step = (values[name] for name in bounds)
        pairs = re.findall(r"(%\w+) = (%[\w#]+)", carried or "")
        state = [values.get(source) for _, source in pairs]
        turns = range(first, end, step)
        # All turns but the first and the last are alike, unless the loop carries an integer: three
        # turns are then evaluated for all.
        middle = len(turns) - 2
        alike = middle > 1 and not any(isinstance(value, int) for value in state)
        total = Counts()
        for turn in (turns[0], turns[1], turns[-1]) if alike else turns:
            values[index] = turn
            values.update(zip((name for name, _ in pairs), state, strict=True))
            counts, outputs = self._region(loop.regions[0], values, program)
            state = [values.get(name) for name in outputs]
            total += counts * (middle if alike and turn == turns[1] else 1)
        self._bind(results, state, values)
        return total

    def _value(self, right: str, values: dict[str, Any], program: int) -> Any:
        """Return the value of an integer, the (elements, bits) of a buffer, or None."""
        if match := _CONSTANT.match(right):
            return {"true": 1, "false": 0}.get(match[1]) if match[1][0] in "tf" else int(match[1])
        if right.startswith("hivm.hir.get_block_idx"):
            return program
        if match := _AFFINE.match(right):
            kind, name, dims, symbols = match.groups()
            operands = [values[n] for part in (dims, symbols or "") for n in _NAME.findall(part)]
            results = None if None in operands else self.maps[name](operands)
            return results and {"apply": lambda r: r[0], "min": min, "max": max}[kind](results)
        if match := _VIEW.match(right):
            return self._view(*match.groups(), right, values)
        if right.startswith(("memref.alloc", "hivm.hir.pointer_cast")):
            return _size(right[right.index("memref<") :] if "pointer" in right else right[13:])
        kind = re.match(r"arith\.(\w+)", right)
        if kind is None:
            return None
        operands = [values.get(name) for name in re.findall(r"%[\w#]+", right)]
        if kind[1] == "select":
            return operands[1] if operands[0] or operands[0] is None else operands[2]
        if not operands or not all(isinstance(value, int) for value in operands):
            return None
        if kind[1] == "cmpi":
            return int(_COMPARISONS[right.split()[1].rstrip(",")](*operands))
        if kind[1] in _INTEGERS:
            return _INTEGERS[kind[1]](*operands)
        # Casts of integers keep their value, or its lowest bit.
        return operands[0] & 1 if right.endswith("to i1") else operands[0]

    def _view(self, kind: str, source: str, right: str, values: dict[str, Any]) -> Any:
        if kind not in ("subview", "reinterpret_cast"):
            return values[source]
        lists = re.findall(r"\[(.*?)\]", right.partition(" : ")[0])
        sizes = [size.strip() for size in lists[1].split(",")] if lists[1] else []
        lengths = [values[size] if size[0] == "%" else int(size) for size in sizes]
        return math.prod(lengths), values[source][1]


def _parsed(lines: Sequence[str], i: int) -> tuple[list[Operation], int]:
    """Return the operations of a region that starts at line i, and the index of its last line."""
    operations: list[Operation] = []
    while not lines[i].startswith("}"):
        if not lines[i]:
            i += 1
            continue
        operation = Operation(lines[i])
        while lines[i].endswith("{"):
            region, i = _parsed(lines, i + 1)
            operation.regions.append(region)
        operations.append(operation)
        i += 1
    return operations, i


def _affine(dims: str, symbols: str, results: str) -> Callable[[Sequence[int]], list[int]]:
    """Return an affine map as a function of its operands."""
    names = [name.strip() for part in (dims, symbols) for name in part.split(",") if name]
    text = re.sub(r"(\S+|\([^()]*\)) ceildiv (\S+)", r"-(-(\1) // (\2))", results)
    text = text.replace("floordiv", "//").replace("mod", "%")
    code = compile(f"[{text}]", "affine map", "eval")
    return lambda operands: eval(code, {}, dict(zip(names, operands, strict=True)))


def _size(type: str) -> tuple[int | None, int]:
    """Return the elements of a memref, or None if its type does not say, and the bits of each."""
    shape, dtype = _TYPED.match(type.strip()).groups()
    sizes = shape.split("x")[:-1]
    return (None if "?" in sizes else math.prod(map(int, sizes))), BITS[dtype]


def _of_call(name: str, operands: str, values: dict[str, Any]) -> Counts:
    """Count one operation on buffers: the bytes of a load or store, else its instructions."""
    buffers = [values[n] for n in _NAME.findall(operands) if isinstance(values.get(n), tuple)]
    moved = [-(-elements * bits // 8) for elements, bits in buffers if elements is not None]
    if not moved:
        return Counts()
    if re.match(r"(load_gm|store_ubuf_to_gm|load$|store$)", name):
        return Counts(bytes=min(moved))
    return Counts(instructions=-(-max(moved) // VECTOR_BYTES))
