"""Forms: the shapes and options with which an op's npu kernels are tested, and those of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Fields = dict[str, Any]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}

# Narrow, odd, as in models, and huge: several rows per tile, one, and rows larger than any tile.
WIDTHS = (1, 100, 512, 1023, 4096, 8192, 14336, 131072)
ROWS = 4096
MASKS = ((True, False, False), (False, True, False), (False, False, True), (False, True, True))


@dataclass(frozen=True, kw_only=True)
class Forms:
    """The cases of an op: fields of its family's Case, except the dtype."""

    shapes: tuple[Fields, ...]
    options: tuple[Fields, ...] = ()
    # Options that only the backward kernel sees.
    backward_options: tuple[Fields, ...] = ()
    # Indices of the shapes at which the options are used.
    optional_at: tuple[int, ...] = (0,)
    # Shape in docs/npu.md -> fewer rows, or groups, with which its traffic is counted.
    counted: dict[int, Fields]
    # Small shapes, some with a tile, at which the lowered code is run; options use the first one.
    executed: tuple[Fields, ...]


COUNTED_ROWS = {
    i: {"shape": (rows, WIDTHS[i])} for i, rows in {1: 5, 4: 3, 5: 2, 6: 2, 7: 1}.items()
}

# One and several rows per tile, rows that fit and rows read twice, and the host code's own tile.
EXECUTED_ROWS = (
    {"shape": (7, 300), "tile": (4, 64)},
    {"shape": (5, 100), "tile": (2, 128)},
    {"shape": (7, 300), "tile": (1, 64)},
    {"shape": (3, 5000)},
)


# A row that stays in the buffer in its own dtype, and does not fill its last piece.
PADDED = 5000


def rows(*options: Fields, backward: tuple[Fields, ...] = ()) -> Forms:
    return Forms(
        shapes=tuple({"shape": (ROWS, N)} for N in (*WIDTHS, PADDED)),
        options=options,
        backward_options=backward,
        # The widths 1023, 4096, 8192 and 14336.
        optional_at=(3, 4, 5, 6),
        counted=COUNTED_ROWS,
        executed=EXECUTED_ROWS,
    )


def masks(gradients: int) -> tuple[Fields, ...]:
    """The proper, nonempty subsets of an op's gradients."""
    return tuple(
        {"output_mask": mask}
        for mask in MASKS
        if any(mask[:gradients]) and not all(mask[:gradients])
    )


_PLAIN_MLP = {"bias": False, "activation": "silu", "tile_rows": None}
TILED_MLP = Forms(
    shapes=tuple(
        {"shape": (ROWS, D), "out": D, "intermediate": width, **_PLAIN_MLP}
        for D, width in ((512, 1023), (4096, 14336))
    ),
    options=({"activation": "gelu"}, {"activation": "gelu_tanh"}),
    counted={},
    # It uses the kernels of swiglu and geglu; the products between them are not Triton's.
    executed=(),
)

# Rows that fit a tile, and rows that do not, which a test of their own runs. The convolution is not
# Triton's, and so the gradient of bias alone has no launch.
MULTI_TOKEN = Forms(
    shapes=tuple({"shape": (2, 2, L, L)} for L in (1, 100, 1023, 2048, 4096, 8192, 16384)),
    options=({"sparse": True}, {"weight_dtype": FP32}, {"layout": "sliced"}),
    backward_options=(
        {"sparse": True, "weight_dtype": BF16},
        {"output_mask": (True, False, False)},
        {"output_mask": (False, True, False)},
    ),
    optional_at=(2, 3, 4, 6),
    counted={},
    executed=({"shape": (2, 2, 70, 70)}, {"shape": (1, 4, 33, 33), "bias": False}),
)

ATTENTION_RESIDUALS = Forms(
    shapes=tuple({"shape": (8, ROWS, N)} for N in (1, 100, 1023, 4096, 8192, 131072)),
    options=({"weight_dtype": None},),
    backward_options=masks(3),
    optional_at=(2, 3, 5),
    # Its rows are in the second dimension.
    counted={},
    executed=(
        {"shape": (3, 7, 300), "tile": (4, 64)},
        {"shape": (3, 5, 100), "tile": (2, 128)},
        {"shape": (2, 3, 300), "tile": (1, 64)},
        {"shape": (2, 3, 5000)},
    ),
)

# Each word occurs twice or so, or all the time; narrow and wide rows.
EMBEDDING = Forms(
    shapes=tuple({"shape": (ROWS, N), "words": 2000} for N in (1, 100, 1023, 4096, 131072)),
    options=({"padding_idx": 3}, {"index_dtype": torch.int32}, {"words": 1}),
    optional_at=(1, 3),
    # Its rows are those of the indices, and it moves them in sorted order.
    counted={},
    executed=(
        {"shape": (9, 100), "words": 5, "tile": (2, 64)},
        {"shape": (40, 70), "words": 2},
        {"shape": (3, 5000), "words": 5},
    ),
)
