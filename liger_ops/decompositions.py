"""Decompositions of the ops into ATen's operators, for programs that run without liger_ops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch

from .library import COMPOSED, NAMESPACE, OPS
from .torch_private import after_import

Table = dict[Any, Callable[..., Any]]


def definitions() -> Table:
    """Return a dictionary: operator -> its definition, which calls ATen's operators, writes into no
    argument, and takes any sizes."""
    ops = getattr(torch.ops, NAMESPACE)
    return {op.overload: op.definition for op in OPS.values()} | {
        getattr(ops, name).default: function for name, function in COMPOSED.items()
    }


def decompositions() -> Table:
    """Return a table for `run_decompositions`: PyTorch's default one, with a decomposition of every
    op.

        program = torch.export.export(model, (), batch, dynamic_shapes=shapes)
        program = program.run_decompositions(liger_ops.decompositions())
        torch.export.save(program, "model.pt2")

    The decomposed program consists of ATen's core operators, and is loaded, compiled and run where
    liger_ops is not installed. It computes what the ops' definitions compute, on every device, with
    their speed and memory. The logits of a head are in as many chunks as the example's number of
    tokens needs, and are one tensor if that number depends on data.

    Returns:
        A dictionary of operators and functions, new in each call.
    """
    table: Table = torch.export.default_decompositions()
    table.update(definitions())
    return table


def export_to_onnx() -> None:
    """Make `torch.onnx.export(dynamo=True)` decompose the ops, which ONNX does not know."""
    after_import("torch.onnx._internal.exporter._decomp", _extend_onnx)


def _extend_onnx(module: Any) -> None:
    from .torch_private import has, onnx_table

    def with_definitions(registered: Collection[Any]) -> Table:
        # An op that the user registered with ONNX stays whole.
        ours = {op: run for op, run in definitions().items() if op not in registered}
        return onnx_table(registered) | ours

    if has("onnx_table"):
        setattr(module, onnx_table.__name__, functools.wraps(onnx_table)(with_definitions))
