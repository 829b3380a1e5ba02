"""embedding, attn_res and tiled_mlp under test."""

from __future__ import annotations

from typing import Any

import torch

from launch_forms import BF16, FP32, LARGE, ROWS, Fields, Forms, masks, shapes
from norm_cases import PARAMETER
from op_under_test import (
    DEVICE,
    SAME,
    OpUnderTest,
    Pick,
    Tensors,
    drawn_for,
    laid_out,
    leading_shape,
    max_abs,
    sizes,
)


def embedding_tensors(case: Any) -> Tensors:
    """Draw weight, indices and dy. The case's shape is dy's: the indices', and the columns."""
    values = drawn_for(case)
    indices = torch.randint(case.words, case.shape[:-1], generator=values.generator)
    indices = indices.to(DEVICE, case.index_dtype)
    if indices.dim() and case.layout != "contiguous":
        indices = laid_out(indices, "strided")
    table = (case.words, case.shape[-1])
    return {
        "weight": values.draw(table, SAME, case.layout, case.scale),
        "indices": indices,
        "dy": values.draw(case.shape, SAME, case.dy_layout),
    }


def embedding_gradient_magnitudes(case: Any, tensors: Tensors) -> list[float]:
    """Return the largest sum of the absolute values that a word's gradient adds."""
    dy = tensors["dy"].double().abs().reshape(-1, case.shape[-1])
    if dy.numel() == 0:
        return [0.0]
    sums = dy.new_zeros(case.words, case.shape[-1])
    return [float(sums.index_add_(0, tensors["indices"].reshape(-1).long(), dy).max())]


def indexed_rows(pick: Pick, fields: Fields) -> Fields:
    # Enough indices for words whose rows are in several chunks.
    leading = (40,) if pick((False, True)) else leading_shape(pick)
    return {"shape": (*leading, pick(sizes(fields["tile"])))}


EMBEDDING = OpUnderTest(
    name="embedding",
    choices={
        "tile": (None, (1, 16), (2, 16), (4, 64), (8, 16)), "words": (5, 1, 2, 7, 50),
        "index_dtype": (torch.int64, torch.int32), "padding_idx": (None, 0, -1),
        "scale": (1.0, 10.0),
    },
    coupled=indexed_rows,
    tensors=embedding_tensors,
    computed={"num_embeddings": lambda case, tensors: case.words},
    no_gradient=("indices",),
    output_magnitudes=lambda c, t: [0.0],
    gradient_magnitudes=embedding_gradient_magnitudes,
    sample_shape=lambda rows: (rows, 4, 6),
    # A word occurs twice on average, or always; rows are narrow and wide. Traffic is not counted,
    # because the rows are those of the indices, and are moved in sorted order.
    forms=Forms(
        shapes=shapes(*((ROWS, N) for N in (1, 100, 1023, 4096, 131072, *LARGE)), words=2000),
        options=({"padding_idx": 3}, {"index_dtype": torch.int32}, {"words": 1}),
        optional_at=(1, 3),
        executed=(
            {"shape": (9, 100), "words": 5, "tile": (2, 64)}, {"shape": (40, 70), "words": 2},
            {"shape": (3, 5000), "words": 5},
        ),
    ),
    compiled=shapes(*((40, N) for N in (100, 4096, 16384, 32768, 65536, 131072)), words=9),
    shaping=("weight", "indices"),
    is_pytorchs_forward=True,
    autocast_as="embedding",
)  # fmt: skip


def attn_res_tensors(case: Any) -> Tensors:
    """Draw x, query, weight and dy. The case's shape is x's, with the blocks first."""
    values, columns = drawn_for(case), case.shape[-1:]
    return {
        "x": values.draw(case.shape, SAME, case.layout, case.scale),
        "query": values.draw(columns, case.query_dtype, scale=0.3),
        "weight": values.draw(columns, case.weight_dtype),
        "dy": values.draw(case.shape[1:], SAME, case.dy_layout),
    }


def attn_res_magnitudes(case: Any, tensors: Tensors) -> tuple[float, float, float]:
    """Return the magnitudes of y and dx, and of dw, the gradient of query * weight."""
    x, query = tensors["x"].double(), tensors["query"].double()
    if x.numel() == 0:
        return 0.0, 0.0, 0.0
    w = query if tensors["weight"] is None else query * tensors["weight"].double()
    dy = tensors["dy"].double()
    rstd = (x.square().mean(-1, keepdim=True) + case.eps).rsqrt()
    # The error of a score is a relative error of its weight in the mean.
    score = 1 + float(((x * w).abs().sum(-1, keepdim=True) * rstd).max())
    normalised = float((x.abs() * rstd).max())
    dalpha = float((dy * x).abs().sum(-1).max())
    dscore = 2 * dalpha * score
    dx = score * max_abs(dy) + dscore * float(rstd.max()) * (max_abs(w) + normalised * score)
    rows = x.numel() // x.shape[-1]
    return score * max_abs(x), dx, rows * dscore * normalised


def attn_res_gradient_magnitudes(case: Any, tensors: Tensors) -> list[float]:
    _, dx, dw = attn_res_magnitudes(case, tensors)
    return [dx, dw * max_abs(tensors["weight"], 1.0), dw * max_abs(tensors["query"])]


def blocks(pick: Pick, fields: Fields) -> Fields:
    return {"shape": (pick((1, 2, 3, 8)), *leading_shape(pick), pick(sizes(fields["tile"])))}


ATTN_RES = OpUnderTest(
    name="attn_res",
    choices={"query_dtype": (FP32, SAME), "weight_dtype": PARAMETER, "eps": (1e-6, 1e-2)},
    coupled=blocks,
    tensors=attn_res_tensors,
    output_magnitudes=lambda c, t: [attn_res_magnitudes(c, t)[0]],
    gradient_magnitudes=attn_res_gradient_magnitudes,
    sample_shape=lambda rows: (4, rows, 6),
    sampled={"query_dtype": SAME, "weight_dtype": SAME},
    # Rows wider than a tile, and many blocks, by the host code's own plan.
    cases={
        str(shape[0]): {"shape": shape, "dtype": BF16, "weight_dtype": SAME, "layout": "sliced"}
        for shape in ((3, 2, 17001), (70, 3, 40))
    },
    # Traffic is not counted, because the rows are in the second dimension.
    forms=Forms(
        shapes=shapes(*((8, ROWS, N) for N in (1, 100, 1023, 4096, 8192, 131072, *LARGE))),
        options=({"weight_dtype": None},),
        backward_options=masks(3),
        optional_at=(2, 3, 5),
        executed=(
            {"shape": (3, 7, 300), "tile": (4, 64)}, {"shape": (3, 5, 100), "tile": (2, 128)},
            {"shape": (2, 3, 300), "tile": (1, 64)}, {"shape": (2, 3, 5000)},
        ),
    ),
    compiled=shapes(*((3, 4, N) for N in (100, 4096, 8192, 16384))),
    rowwise=(),
    autocast_as="mul.Tensor",
)  # fmt: skip


def mlp_tensors(case: Any) -> Tensors:
    values = drawn_for(case)
    D, I, O = case.shape[-1], case.intermediate, case.out
    bias = SAME if case.bias else None
    return {
        "x": values.draw(case.shape, SAME, case.layout, case.scale),
        "gate_weight": values.draw((I, D), scale=D**-0.5),
        "up_weight": values.draw((I, D), scale=D**-0.5),
        "down_weight": values.draw((O, I), scale=I**-0.5),
        "gate_bias": values.draw((I,), bias),
        "up_bias": values.draw((I,), bias),
        "down_bias": values.draw((O,), bias),
        "dy": values.draw((*case.shape[:-1], O), SAME, case.dy_layout),
    }


def tiles_of_tokens(pick: Pick, fields: Fields) -> Fields:
    rows = pick(((0,), (1,), (7,), (2, 5), (130,)))
    D, intermediate, out = (pick((1, 5, 16, 33)) for _ in range(3))
    return {
        "shape": (*rows, D), "intermediate": intermediate, "out": out,
        "tile_rows": pick((None, 1, 4, 128) if rows != (130,) else (None, 50, 128)),
    }  # fmt: skip


# test_tiled_mlp.py checks its kernels with bounds of their own. All sizes of the sample differ,
# because tracing would treat equal ones as one size.
TILED_MLP = OpUnderTest(
    name="tiled_mlp_forward",
    choices={
        "intermediate": (7,), "out": (6,), "bias": (True, False),
        "activation": ("silu", "gelu", "gelu_tanh"), "tile_rows": (2,), "tile": (None,),
        "scale": (1.0,),
    },
    coupled=tiles_of_tokens,
    tensors=mlp_tensors,
    sample_shape=lambda rows: (rows, 2, 4),
    forms=Forms(
        shapes=[
            {"shape": (ROWS, D), "out": D, "intermediate": width}
            for D, width in ((512, 1023), (4096, 14336))
        ],
        options=({"activation": "gelu"}, {"activation": "gelu_tanh"}),
        common={"bias": False, "tile_rows": None},
    ),
    multiplies=True,
    autocast_as="linear",
)  # fmt: skip

OPS = (EMBEDDING, ATTN_RES, TILED_MLP)
