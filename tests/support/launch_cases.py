"""Cases with which the npu kernels are lowered, planned and run, and their traffic is counted.

An op whose forms differ from the usual has an entry in OWN_FORMS. `shapes` are used in every dtype;
`options`, which change the code, are each used at a few of the shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

import mhc_forms
from launch_forms import (
    ATTENTION_RESIDUALS,
    BF16,
    COUNTED_ROWS,
    DTYPES,
    EMBEDDING,
    EXECUTED_ROWS,
    FP32,
    MULTI_TOKEN,
    ROWS,
    TILED_MLP,
    WIDTHS,
    Fields,
    Forms,
    masks,
    rows,
)
from launch_forms_of_losses import (
    PLAIN_DISTRIBUTIONS,
    PLAIN_DIVERGENCE,
    PLAIN_LOG_PROB,
    PLAIN_LOSS,
    distributions,
    divergence,
    head,
    log_prob,
    log_prob_head,
    loss,
    two_heads,
)
from op_table import OPS
from op_under_test import Case, OpUnderTest


@dataclass(frozen=True)
class LaunchCase:
    op: OpUnderTest
    case: Case
    label: str
    directions: tuple[bool, ...] = (False, True)
    # Whether it is one of `shapes` without options.
    plain: bool = True


def windows(*shapes: Fields, executed: tuple[Fields, ...], option: Fields, **options: Any) -> Forms:
    def form(fields: Fields) -> Fields:
        return {"softmax_scale": None, **options, **fields}

    return Forms(
        shapes=tuple(map(form, shapes)),
        options=(option,),
        backward_options=masks(3),
        optional_at=(0,),
        counted={},
        executed=tuple(map(form, executed)),
    )


LINE = windows(
    *(
        {"shape": (1, 8, 32768, D), "key_heads": 2, "layout": "model", "key_layout": "model"}
        for D in (64, 80, 128, 256)
    ),
    executed=(
        {"shape": (1, 4, 70, 20), "key_heads": 2, "kernel_size": (9,)},
        {"shape": (1, 2, 40, 16), "kernel_size": (5,), "dilation": (3,), "tile": (1, 16)},
    ),
    option={"border": "shifted"},
    kernel_size=(129,),
    dilation=(1,),
)
PLANE = windows(
    {"shape": (2, 4, 56, 56, 64), "key_heads": 4},
    {"shape": (2, 4, 56, 56, 64), "key_heads": 4, "dilation": (2, 4)},
    executed=({"shape": (1, 2, 9, 20, 16), "kernel_size": (3, 5), "dilation": (2, 1)},),
    option={"border": "clipped"},
    kernel_size=(7, 7),
    dilation=(1, 1),
    is_causal=(False, False),
    border="shifted",
)

WEIGHTLESS = {"weight_dtype": None}
PLAIN = {"weight_dtype": None, "bias_dtype": None}
MODES = ({"casting_mode": "gemma", "offset": 1.0}, {"casting_mode": "none"})
FP32_WEIGHTED = {"weight_dtype": FP32}
FP32_WEIGHTS = {"weight_dtype": FP32, "bias_dtype": FP32}
DX_ALONE = {"output_mask": (True, False, False)}
# Rows that are not contiguous, and start at any address.
SLICED = {"layout": "sliced", "dy_layout": "sliced"}

GROUPS = tuple(
    {"shape": shape, "num_groups": groups}
    for shape, groups in (
        ((2, 320, 64, 64), 32),
        ((2, 640, 7, 9), 32),
        ((2, 1280, 16, 16), 32),
        ((2, 320, 128, 128), 32),
        ((1, 64, 512, 512), 32),
        ((1000, 512), 32),
        ((4, 4096), 1),
        ((2, 100000), 1),
        ((2, 6, 100003), 3),
        ((2, 4, 11), 4),
    )
)

# Narrow groups of columns, those of Mamba 2 and Zamba2, one group, and groups that fit no tile.
GROUPED_NORM = Forms(
    shapes=tuple(
        {"shape": (ROWS, N), "num_groups": groups}
        for N, groups in ((24, 3), (1024, 8), (8192, 8), (4096, 1), (8192, 1), (28672, 2))
    ),
    options=({"casting_mode": "gemma"}, FP32_WEIGHTED),
    backward_options=({**WEIGHTLESS, **DX_ALONE}, *masks(3)),
    optional_at=(2, 3, 5),
    counted={
        i: {"shape": (rows, N), "num_groups": groups}
        for i, rows, N, groups in ((2, 4, 8192, 8), (3, 3, 4096, 1), (5, 2, 28672, 2))
    },
    executed=(
        {"shape": (7, 300), "num_groups": 3, "tile": (4, 64)},
        {"shape": (5, 96), "num_groups": 2, "tile": (2, 64)},
        {"shape": (5, 96), "num_groups": 3},
        {"shape": (3, 10000), "num_groups": 2},
    ),
)


def modulated(*options: Fields, plain: Fields, gradients: int, form: str) -> Forms:
    """Rows of three samples: narrow, as in DiT, Flux and Wan, and that fit no tile."""
    widths, counted = (100, 1152, 3072, 5120, 131072), form == ""
    # The gradient of each token's shift is dy, without a launch.
    alone = ((0,), (1,)) if form == "-token" else ((0,), (1,), (2,))
    subsets = (*alone, tuple(range(1, gradients)))
    return Forms(
        shapes=tuple({"shape": (3, 1024, N)} for N in widths),
        options=({**plain, "casting_mode": "float32", "scale_dtype": FP32}, plain, *options),
        backward_options=tuple(
            {**plain, "output_mask": tuple(i in subset for i in range(5))} for subset in subsets
        ),
        optional_at=(1, 2, 3),
        counted={2: {"shape": (1, 3, 3072)}, 3: {"shape": (1, 2, 5120)}} if counted else {},
        executed=(
            {"shape": (3, 2, 300), "tile": (4, 64)},
            {"shape": (2, 3, 100), "tile": (2, 128)},
            {"shape": (2, 3, 5000)},
        ),
    )


HEADS = {"k_heads": 8, "layout": "model", "k_layout": "model", "tables": "batch"}
ROPES = tuple(
    {"shape": (2, heads, 2048, D), "rotary": R, **HEADS}
    for heads, D, R in ((32, 128, 128), (32, 96, 24), (8, 256, 256), (8, 64, 64), (8, 8192, 8190))
)

# 5 x 4096 x 131072 elements exceed int32.
ACTIVATIONS = (*({"shape": (ROWS, N)} for N in WIDTHS), {"shape": (5 * ROWS, 131072)})


def rope(
    *options: Fields, backward: tuple[Fields, ...] = (), sections: bool = False, **of_all: Any
) -> Forms:
    """`of_all` is added to every shape. With `sections`, each gets a third of the pairs."""

    def form(**fields: Any) -> Fields:
        pairs = fields["rotary"] // 2
        cut = {"sections": (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)} if sections else {}
        return {**fields, **of_all, **cut}

    return Forms(
        shapes=tuple(form(**shape) for shape in ROPES),
        options=options,
        backward_options=backward,
        optional_at=(0, 1, 4),
        counted={
            i: {"shape": (1, heads, 64, D)} for i, (heads, D) in enumerate(((32, 128), (32, 96)))
        },
        executed=(
            form(shape=(2, 3, 5, 90), rotary=80, tile=(2, 16)),
            form(shape=(2, 3, 5, 64), rotary=64),
        ),
    )


# Heads of models, with and without elements after the pairs; and heads that fit no tile.
_NORMED = {"q_weight_dtype": BF16, "k_weight_dtype": BF16}
HEADS_NORM = Forms(
    shapes=tuple(
        {"shape": (2, heads, 2048, D), "rotary": R, **HEADS, **_NORMED}
        for heads, D, R in ((32, 128, 128), (8, 256, 256), (16, 256, 64), (8, 8192, 8190))
    ),
    options=(
        {"interleaved": True},
        {"sections": (20, 20, 24)},
        {"per_pair": True, "table_dtype": FP32},
        {"is_complex": True, "table_dtype": FP32},
        {"casting_mode": "none"},
        {"casting_mode": "gemma", "offset": 1.0},
        {"layout": "sliced"},
        {"q_weight_dtype": None},
    ),
    backward_options=tuple(
        {"output_mask": mask}
        for mask in ((True, True, False, False), (False, False, True, True), (True, *[False] * 3))
    ),
    counted={0: {"shape": (1, 32, 64, 128)}, 1: {"shape": (1, 8, 64, 256)}},
    executed=(
        {"shape": (1, 2, 5, 138), "rotary": 128, "tile": (2, 64)},
        {"shape": (2, 3, 5, 64), "rotary": 64},
    ),
)


def activation(*options: Fields, gradients: int = 1) -> Forms:
    mask = masks(2) if gradients == 2 else ()
    return Forms(
        shapes=ACTIVATIONS,
        options=(SLICED, *options),
        backward_options=mask,
        # The widths 1023 and 4096.
        optional_at=(3, 4),
        counted=COUNTED_ROWS,
        executed=EXECUTED_ROWS,
    )


# Ops that are not listed have the forms of rows or, if elementwise, of activations.
OWN_FORMS = {
    "rms_norm": rows(
        *MODES,
        FP32_WEIGHTS,
        backward=({**WEIGHTLESS, **DX_ALONE}, *masks(2)),
    ),
    "fused_add_rms_norm": rows(
        *MODES,
        FP32_WEIGHTS,
        {"residual_dtype": FP32},
        backward=(
            {"has_ds": False},
            {**WEIGHTLESS, **DX_ALONE},
            *masks(2),
            {"has_ds": False, **DX_ALONE},
        ),
    ),
    "gated_rms_norm": rows(
        {"activation": "sigmoid", "casting_mode": "gemma"},
        FP32_WEIGHTED,
        {"gate_dtype": FP32},
        backward=({**WEIGHTLESS, **DX_ALONE}, *masks(3)),
    ),
    "gated_rms_norm-grouped": GROUPED_NORM,
    "layer_norm": rows(
        FP32_WEIGHTS, {"bias_dtype": None}, backward=({**PLAIN, **DX_ALONE}, *masks(3))
    ),
    **{
        f"modulated_rms_norm{form}": modulated(*MODES, plain=WEIGHTLESS, gradients=4, form=form)
        for form in ("", "-sample", "-token")
    },
    **{
        f"modulated_layer_norm{form}": modulated(plain=PLAIN, gradients=5, form=form)
        for form in ("", "-sample", "-token")
    },
    "dyt": rows(
        {"gamma_dtype": FP32, "beta_dtype": None},
        backward=tuple(
            {"output_mask": mask}
            for mask in (
                (True, False, False, False),
                (False, True, False, False),
                (False, False, False, True),
                (False, True, True, True),
            )
        ),
    ),
    # Rows of 9000 fit no tile, and are kept in the dtype that they are stored in.
    "poly_norm": replace(
        rows({"weight_dtype": FP32, "bias_dtype": None}, backward=(DX_ALONE, *masks(3))),
        executed=(*EXECUTED_ROWS, {"shape": (3, 9000)}),
    ),
    "group_norm": Forms(
        shapes=GROUPS,
        options=(FP32_WEIGHTS,),
        backward_options=({**PLAIN, **DX_ALONE}, *masks(3)),
        optional_at=(0, 1, 2, 3, 5, 7),
        counted={
            0: {"shape": (1, 20, 64, 64), "num_groups": 2},
            1: {"shape": (2, 40, 7, 9), "num_groups": 2},
            2: {"shape": (1, 80, 16, 16), "num_groups": 2},
            5: {"shape": (4, 32), "num_groups": 2},
            6: {"shape": (2, 4096)},
            7: {"shape": (1, 40000)},
        },
        executed=(
            {"shape": (3, 12, 5, 7), "num_groups": 3, "tile": (2, 16)},
            {"shape": (3, 12, 5, 7), "num_groups": 3},
            {"shape": (3, 12, 5, 7), "num_groups": 3, "tile": (4, 64)},
            {"shape": (5, 12), "num_groups": 3},
            {"shape": (2, 6, 50, 51), "num_groups": 2},
            # Groups that fit no tile, and are kept in the dtype that they are stored in.
            {"shape": (2, 44, 15, 16), "num_groups": 2},
            {"shape": (2, 100, 1), "num_groups": 1, "tile": (8, 16)},
            # One group of channels with one position is a row of layer_norm.
            {"shape": (2, 5000, 1), "num_groups": 1},
        ),
    ),
    # Rows of 9000 fit no tile, and are kept in the dtype that they are stored in.
    "softmax": replace(rows(), executed=(*EXECUTED_ROWS, {"shape": (3, 9000)})),
    "log_softmax": replace(rows(), executed=(*EXECUTED_ROWS, {"shape": (3, 9000)})),
    # Rows that fit nowhere are read with every step of Newton's iteration, and are not counted.
    "sparsemax_forward": replace(
        rows(),
        counted={i: rows for i, rows in COUNTED_ROWS.items() if i < 7},
        executed=(*EXECUTED_ROWS, {"shape": (3, 9000)}),
    ),
    "neighborhood_attention_forward-line": LINE,
    "neighborhood_attention_forward-plane": PLANE,
    "cross_entropy_forward-mean": loss(),
    "cross_entropy_forward-none": loss(),
    "linear_cross_entropy_forward-mean": head(),
    "linear_cross_entropy_forward-none": head(),
    "log_prob_forward": log_prob(),
    "divergence_forward-jsd": divergence({"beta": 0.1, "temperature": 0.7}, {"kind": "tvd"}),
    "divergence_forward-forward-kl": divergence({"kind": "reverse_kl"}, {"kind": "cosine"}),
    "kl_div": distributions({"reduction": "none"}, {"log_target": True}),
    "jsd": distributions({"ignored": 3}, {"beta": 1.0}),
    "tvd": distributions({"reduction": "none", "ignored": 3}),
    "linear_log_prob_forward": log_prob_head(**PLAIN_LOG_PROB),
    "linear_top_k_divergence_forward": log_prob_head(K=64, temperature=1.0, softcap=None),
    "linear_divergence_forward-mean": two_heads(),
    "linear_divergence_forward-none": two_heads(),
    "swiglu": activation({"up_dtype": FP32}, gradients=2),
    "swiglu-packed": activation(),
    "geglu": activation({"approximate": "none"}, gradients=2),
    "geglu-packed": activation({"approximate": "none"}),
    "clamped_swiglu": activation(gradients=2),
    "clamped_swiglu-packed": activation(),
    "clamped_swiglu-interleaved": activation(),
    "embedding": EMBEDDING,
    "attn_res": ATTENTION_RESIDUALS,
    "tiled_mlp_forward": TILED_MLP,
    "multi_token_attention_forward": MULTI_TOKEN,
    "rope": rope(
        {"interleaved": True},
        {"tables": "one"},
        {"table_dtype": FP32},
        {"layout": "sliced"},
        backward=masks(2),
    ),
    "rope-per-pair": rope({"interleaved": True}),
    "rope-complex": rope({"interleaved": True}, table_dtype=FP32),
    "rope-sections": rope(sections=True),
    "rope-sections-per-pair": rope({"interleaved": False}, sections=True),
    # One table for the batch, as in Flux. PyTorch reorders it, which the traffic does not count.
    "rope-matrices": rope(table_dtype=FP32, tables="none"),
    "rope-deinterleave": rope({"per_pair": True}),
    "rms_norm_rope": HEADS_NORM,
    **mhc_forms.FORMS,
}


FORMS = {
    name: OWN_FORMS.get(name) or (activation() if op.elementwise else rows())
    for name, op in OPS.items()
}


def _label(dtype: torch.dtype, form: Fields) -> str:
    usual = {
        **HEADS,
        **PLAIN_LOSS,
        **PLAIN_LOG_PROB,
        **PLAIN_DIVERGENCE,
        **PLAIN_DISTRIBUTIONS,
        "ignored": form.get("ignored") or form.get("ignored", 0),
        "rows": None,
        "shape": form["shape"],
    }
    named = {key: value for key, value in form.items() if usual.get(key, ...) != value}
    shape = "x".join(map(str, form["shape"]))
    options = (f"{key}={DTYPES.get(value, value)}" for key, value in named.items())
    return " ".join([DTYPES[dtype], shape, *options]).replace(", ", ",")


def _case(op: OpUnderTest, dtype: torch.dtype, form: Fields) -> Case:
    sample = op.sample(dtype)
    unknown = form.keys() - {field.name for field in fields(sample)}
    if unknown:
        raise ValueError(f"cases: {op.id} has no {', '.join(sorted(unknown))}")
    return replace(sample, **form)


def _taken(
    shapes: Sequence[Fields], optional: Sequence[Fields], forms: Forms
) -> Iterator[tuple[torch.dtype, Fields, tuple[bool, ...], bool]]:
    """The shapes in every dtype, then those of `optional` with each option."""
    for dtype in DTYPES:
        for shape in shapes:
            yield dtype, shape, (False, True), True
    for shape in optional:
        for dtype in (BF16, FP32):
            for option in forms.options:
                yield dtype, {**shape, **option}, (False, True), False
            for option in forms.backward_options:
                yield dtype, {**shape, **option}, (True,), False


def _launch_case(
    op: OpUnderTest, dtype: torch.dtype, form: Fields, directions: tuple[bool, ...], plain: bool
) -> LaunchCase:
    if op.is_pytorchs_forward:
        directions = (True,)
    return LaunchCase(op, _case(op, dtype, form), _label(dtype, form), directions, plain)


def launched() -> Iterator[LaunchCase]:
    """The cases to lower and plan."""
    for name, forms in FORMS.items():
        optional = [forms.shapes[i] for i in forms.optional_at]
        for dtype, form, directions, plain in _taken(forms.shapes, optional, forms):
            yield _launch_case(OPS[name], dtype, form, directions, plain)


def counted() -> Iterator[tuple[LaunchCase, LaunchCase]]:
    """The cases of docs/npu.md in bfloat16: as planned, and with the rows for counting traffic."""
    for name, forms in FORMS.items():
        op = OPS[name]
        for i, fewer in forms.counted.items():
            planned, few = forms.shapes[i], {**forms.shapes[i], **fewer}
            yield (
                LaunchCase(op, _case(op, BF16, planned), _label(BF16, planned)),
                LaunchCase(op, _case(op, BF16, few), _label(BF16, few)),
            )


def executed() -> Iterator[LaunchCase]:
    """The cases to run."""
    for name, forms in FORMS.items():
        for dtype, form, directions, plain in _taken(forms.executed, forms.executed[:1], forms):
            yield _launch_case(OPS[name], dtype, form, directions, plain)
