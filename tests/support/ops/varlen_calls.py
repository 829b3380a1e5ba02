"""Calls of varlen_attention that tests write by hand, by each implementation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_ops import library
from op_under_test import DEVICE

FORWARD, BACKWARD = (
    library.OPS["varlen_attention_forward"],
    library.OPS["varlen_attention_backward"],
)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def drawn(
    T: int, heads: int = 2, key_heads: int = 2, width: int = 4, E: int | None = None,
    dtype: torch.dtype = torch.float64, seed: int = 0,
) -> list[Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    sizes = ((heads, width), (key_heads, width), (key_heads, E or width))
    return [
        torch.randn(T, *size, generator=generator).to(DEVICE, dtype).requires_grad_()
        for size in sizes
    ]


def call_of(T: int, documents: Tensor, max_seqlen: int, **more: Any) -> Any:
    """Return a call of the forward op. `more` are its other arguments and those of `drawn`."""
    sizes = {name: more.pop(name) for name in ("heads", "width", "E", "dtype") if name in more}
    with torch.no_grad():
        tensors = [x.detach() for x in drawn(T, **{"dtype": torch.float32, **sizes})]
    return FORWARD.arguments(*tensors, documents, max_seqlen)._replace(**more)


def run(folder: str, call: Any) -> tuple[Tensor, Tensor]:
    return (FORWARD.definition if folder == "definition" else FORWARD.kernels[folder])(*call)


def gradients(folder: str, call: Any, dy: Tensor, mask: tuple[bool, ...] = (True,) * 4) -> Any:
    given = {**call._asdict(), **dict(zip(("y", "lse"), run(folder, call), strict=True))}
    given |= {"dy": dy, "output_mask": list(mask)}
    arguments = [given[name] for name in BACKWARD.arguments._fields]
    run_of = BACKWARD.definition if folder == "definition" else BACKWARD.kernels[folder]
    return run_of(*arguments)
