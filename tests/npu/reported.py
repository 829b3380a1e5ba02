"""Find in lowered code what users of Ascend report to be wrong on a device, or what may be.

Neither the compilers nor the execution on a CPU show it: the code itself is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_REDUCED = re.compile(
    r"linalg\.reduce ins\(.*? : tensor<([\dx]+)x\w+>.*? dimensions = \[([\d, ]+)\]"
)
_COPIED = re.compile(r"memref\.copy (%[\w#]+), (%[\w#]+) :")
_LOADED = re.compile(r"(%[\w#]+) = bufferization\.to_tensor (%[\w#]+)")
_CHOSEN = re.compile(r"(%[\w#]+) = arith\.select %[\w#]+, (%[\w#]+), (%[\w#]+) : tensor")
_STORED = re.compile(r"materialize_in_destination (%[\w#]+) in writable (%[\w#]+)")
_NUMBER = re.compile(r"(%[\w#]+) = memref\.load ")
_WRAPPED = re.compile(r"(%[\w#]+) = tensor\.insert (%[\w#]+) into ")
_ATOMIC = re.compile(r"linalg\.generic .*GenericAtomicRMW = \"(\w+)\"")


def reported(mlir: str) -> list[str]:
    """List what lowered code has of this, each as its name, a colon and the line."""
    return [*_leading_axes(mlir), *_whole_stores(mlir), *_masked_numbers(mlir), *_atomics(mlir)]


def _leading_axes(mlir: str) -> Iterator[str]:
    """Yield the reductions over the first of three axes or more, which an open report of
    triton-ascend has wrong on a 910B: the sums are those over another axis."""
    for line in mlir.splitlines():
        match = _REDUCED.search(line)
        if match and match[1].count("x") >= 2 and "0" in match[2].split(", "):
            yield f"leading axis: {line.strip()}"


def _whole_stores(mlir: str) -> Iterator[str]:
    """Yield the stores with a mask that is no range of indices. They become a load, a choice and a
    store of the whole block: beyond the end of a tensor, or over what another program wrote."""
    copied, loaded, chosen = {}, {}, {}
    for line in mlir.splitlines():
        if match := _COPIED.search(line):
            copied[match[2]] = match[1]
        elif match := _LOADED.search(line):
            loaded[match[1]] = copied.get(match[2])
        elif match := _CHOSEN.search(line):
            chosen[match[1]] = match.groups()[1:]
        match = _STORED.search(line)
        if match and match[2] in map(loaded.get, chosen.get(match[1], ())):
            yield f"whole store: {line.strip()}"


def _masked_numbers(mlir: str) -> Iterator[str]:
    """Yield the choices between a number and its `other`: a masked load of a single number loads it
    in any case, from an address that may be outside of the tensor."""
    numbers, wrapped = set(), set()
    for line in mlir.splitlines():
        if match := _NUMBER.search(line):
            numbers.add(match[1])
        elif match := _WRAPPED.search(line):
            wrapped |= {match[1]} if match[2] in numbers else set()
        elif (match := _CHOSEN.search(line)) and wrapped & {match[2], match[3]}:
            yield f"masked number: {line.strip()}"


def _atomics(mlir: str) -> Iterator[str]:
    """Yield the atomics on floats, whose order, and so whose sum, differs between runs."""
    for line in mlir.splitlines():
        match = _ATOMIC.search(line)
        if match and match[1].startswith("f"):
            yield f"atomic: {line.strip()}"
