"""FLOPs of the ops for `torch.utils.flop_counter`, by default those of their definitions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .library import OPS
from .record import Op

MODULE = "torch.utils.flop_counter"


def count_flops() -> None:
    """Let FlopCounterMode count every op; it counts nothing for an op without a formula.

    A loss with its head that recomputes its logits in the backward counts these products too, as
    FlopCounterMode does for a recomputed part of a model.

    PyTorch's counter imports Triton, and so is not imported here: its formulas are registered when
    somebody imports it.
    """
    if MODULE in sys.modules:
        _register_formulas()
    else:
        sys.meta_path.insert(0, _CounterFinder())


class _CounterFinder(MetaPathFinder):
    """Finds the counter's module once, and registers the formulas after its import."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            execute(module)
            _register_formulas()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register_formulas() -> None:
    from torch.utils.flop_counter import register_flop_formula

    for op in OPS.values():
        packet = getattr(torch.ops.liger, op.name)
        register_flop_formula(packet, get_raw=True)(_formula(op))


def _formula(op: Op) -> Callable[..., int]:
    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        from torch.utils.flop_counter import FlopCounterMode

        if op.flops is not None:
            return op.flops(op.arguments(*args, **kwargs))
        # Tensors on the device "meta" have shapes and no data, so that nothing is computed.
        args, kwargs = pytree.tree_map_only(Tensor, _on_meta, (args, kwargs))
        with FlopCounterMode(display=False) as counter:
            op.definition(*args, **kwargs)
        return counter.get_total_flops()

    return count


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
