"""Uses of the ops' definitions beside running them: decompositions into ATen's operators, for
programs that run without liger_ops, and counts of FLOPs in `torch.utils.flop_counter`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .library import COMPOSED, NAMESPACE, OPS
from .record import Op
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


def count_flops() -> None:
    """Register a formula of every op with FlopCounterMode, which counts nothing for other ops.

    The backward of a loss with its head may recompute the logits; these products are counted too,
    as FlopCounterMode counts those of a checkpoint.

    PyTorch's counter imports Triton, and so is not imported here: the formulas are registered when
    another module imports it.
    """
    after_import("torch.utils.flop_counter", _register_formulas)


def _register_formulas(counter: Any) -> None:
    for op in OPS.values():
        packet = getattr(torch.ops.liger, op.name)
        counter.register_flop_formula(packet, get_raw=True)(_formula(op))


def _formula(op: Op) -> Callable[..., int]:
    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        from torch.utils.flop_counter import FlopCounterMode

        if op.flops is not None:
            return op.flops(op.arguments(*args, **kwargs))
        # Tensors on the device "meta" have shapes and no data: the definition computes nothing.
        args, kwargs = pytree.tree_map_only(Tensor, _on_meta, (args, kwargs))
        with FlopCounterMode(display=False) as counter:
            op.definition(*args, **kwargs)
        return counter.get_total_flops()

    return count


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
