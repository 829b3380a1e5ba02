"""Forms: the shapes and options with which an op's npu kernels are lowered, planned and run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Fields = dict[str, Any]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}

# Columns: narrow, odd, as in models, and huge. A tile has several rows, or one, or a part of a row.
WIDTHS = (1, 100, 512, 1023, 4096, 8192, 14336, 131072)
ROWS = 4096
# The hidden sizes of the largest models.
LARGE = (16384, 32768)
# Columns of a row that stays in the buffer in its own dtype, and does not fill its last piece.
PADDED = 5000
MASKS = ((True, False, False), (False, True, False), (False, False, True), (False, True, True))


@dataclass(frozen=True, kw_only=True)
class Forms:
    """The launch cases of an op, as fields of its Case without the dtype."""

    shapes: Sequence[Fields]
    options: Sequence[Fields] = ()
    # Options that only the backward kernel sees.
    backward_options: Sequence[Fields] = ()
    # Indices of the shapes at which the options are used.
    optional_at: Sequence[int] = (0,)
    # Index of a shape in npu.md -> fewer rows, or groups, with which its traffic is counted.
    counted: dict[int, Fields] = field(default_factory=dict)
    # Small shapes, some with a tile, at which the lowered code is run; options use the first one.
    # Empty for an op that uses the kernels of another op, which run there.
    executed: Sequence[Fields] = ()
    # The fields that all cases share.
    common: Fields = field(default_factory=dict)


def shapes(*sizes: tuple[int, ...], **fields: Any) -> tuple[Fields, ...]:
    return tuple({"shape": shape, **fields} for shape in sizes)


COUNTED_ROWS = {
    i: {"shape": (rows, WIDTHS[i])} for i, rows in {1: 5, 4: 3, 5: 2, 6: 2, 7: 1}.items()
}


# Those of `rows`, which has the widths of LARGE behind the others and PADDED.
COUNTED_WITH_LARGE = COUNTED_ROWS | {
    len(WIDTHS) + 1 + i: {"shape": (1, N)} for i, N in enumerate(LARGE)
}


def tiled(*leading: int) -> tuple[Fields, ...]:
    """Return small forms: one and several rows per tile, rows that fit, rows that are read twice,
    and one with the host code's own tile."""
    sizes = ((7, 300, (4, 64)), (5, 100, (2, 128)), (7, 300, (1, 64)))
    return (
        *({"shape": (*leading, M, N), "tile": tile} for M, N, tile in sizes),
        {"shape": (*leading, 3, 5000)},
    )


# Rows of 9000 columns fit no tile, and are kept in the dtype that they are stored in.
KEPT = {"shape": (3, 9000)}


def rows(
    *options: Fields, backward: Sequence[Fields] = (),
    counted: dict[int, Fields] = COUNTED_WITH_LARGE, executed: tuple[Fields, ...] = (),
) -> Forms:  # fmt: skip
    """Return the forms of an op of rows, such as a norm."""
    return Forms(
        shapes=shapes(*((ROWS, N) for N in (*WIDTHS, PADDED, *LARGE))),
        options=options,
        backward_options=backward,
        # The widths 1023, 4096, 8192 and 14336.
        optional_at=(3, 4, 5, 6),
        counted=counted,
        executed=(*tiled(), *executed),
    )


def masks(gradients: int) -> tuple[Fields, ...]:
    """Return those of MASKS that ask for some, but not all, of an op's gradients."""
    return tuple(
        {"output_mask": mask}
        for mask in MASKS
        if any(mask[:gradients]) and not all(mask[:gradients])
    )


VOCABULARIES = (2, 100, 1023, 4096, 32000, 128256, 151937)


def loss_forms(
    *options: Fields, common: Fields, optional_at: Sequence[int] = (1, 3, 5),
    backward: bool = False, counted: Fields | None = None, executed: Sequence[Fields] = (),
) -> Forms:  # fmt: skip
    """Return the forms of a loss, of rows of logits or of probabilities.

    With `backward`, one of them asks for the first gradient alone.
    """
    return Forms(
        shapes=shapes(*((ROWS, V) for V in VOCABULARIES)),
        options=options,
        backward_options=({"output_mask": (True, False, False)},) if backward else (),
        optional_at=optional_at,
        counted={
            i: {"shape": (rows, VOCABULARIES[i]), **(counted or {})}
            for i, rows in {3: 3, 4: 2, 5: 1}.items()
        },
        executed=(*tiled(), *executed),
        common=common,
    )


def head_forms(
    *options: Fields, sizes: Sequence[Fields], backward: Sequence[Fields] = (), common: Fields
) -> Forms:
    """Return the forms of a head. None is executed: its products are not Triton's, and the loss's
    entry runs the kernels between them."""
    return Forms(
        shapes=[{"shape": (ROWS,), **size} for size in sizes],
        options=options,
        backward_options=backward,
        optional_at=tuple(range(len(sizes))),
        common=common,
    )
