"""Count the FLOPs of the ops in `torch.utils.flop_counter`, by default those of the definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .library import OPS
from .record import Op
from .torch_private import after_import


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
