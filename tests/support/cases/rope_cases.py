"""rope and rms_norm_rope under test."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from launch_forms import BF16, FP32, Fields, Forms, masks
from norm_cases import EPS, MODES, PARAMETER
from op_under_test import (
    DY_LAYOUTS,
    SAME,
    X_LAYOUTS,
    OpUnderTest,
    Pick,
    Tensors,
    drawn_for,
    laid_out,
    max_abs,
)

MODEL_LAYOUTS = (*X_LAYOUTS, "model")
# The shape is q's.
# tables: The dimension of cos and sin before (S, R): none, one of size 1, or the batch.
# kind: cos and sin are real, or one tensor holds cos + i sin, or a 2 x 2 matrix for each pair.
# sections: The pairs of each section; cos and sin then have three tables each.
# deinterleave: Whether interleaved pairs are written in halves.
CHOICES = {
    "k_heads": (1, 2, 3, 0), "tables": ("none", "one", "batch"), "rotary": (2,),
    "kind": ("real", "real", "real", "complex", "matrices"), "table_dtype": (FP32, SAME),
    "layout": MODEL_LAYOUTS, "k_layout": MODEL_LAYOUTS, "table_layout": (*X_LAYOUTS, "strided"),
    "dy_layout": (*DY_LAYOUTS, "model"), "interleaved": (False, True), "per_pair": (False, True),
    "sections": (None,), "deinterleave": (False, True), "scale": (1.0, 0.05, 100.0),
    # The tile has positions and pairs.
    "tile": (None, (1, 16), (2, 16), (4, 4)),
}  # fmt: skip


def rotations(pick: Pick, fields: Fields) -> Fields:
    D = pick((2, 3, 6, 16, 20, 34, 80))
    whole = D - D % 2
    rotary = pick((whole, 2 * (whole // 4) or whole))
    real = fields["kind"] == "real"
    sections = None
    if fields["kind"] != "matrices" and pick((False, True)):
        # The cuda kernel loads vectors of the tables if sections end at multiples of 8.
        ends = sorted({0, 1, 8, 16, 24, rotary // 2})
        first, second = sorted(min(pick(ends), rotary // 2) for _ in range(2))
        sections = (first, second - first, rotary // 2 - second)
    return {
        "shape": (pick((1, 2, 0)), pick((1, 2, 3, 0)), pick((1, 2, 3, 5, 0)), D),
        "rotary": rotary,
        "sections": sections,
        "deinterleave": fields["deinterleave"] and (fields["interleaved"] or not real),
    }


def tensors(case: Any) -> Tensors:
    values = drawn_for(case)
    B, _, S, D = case.shape
    k_shape = (B, case.k_heads, S, D)
    before = {"none": (), "one": (1,), "batch": (B,)}[case.tables]
    if case.sections is not None:
        before = (3, *(before or (1,)))
    pairs = case.per_pair or case.kind != "real"
    shape = (*before, S, case.rotary // 2 if pairs else case.rotary)
    if case.kind == "matrices":
        shape = (*shape, 2, 2)
    dtype = case.dtype if case.table_dtype == SAME else case.table_dtype
    if case.kind == "complex":
        # There is no complex dtype for bfloat16.
        dtype = torch.promote_types(dtype, FP32)
    drawn = {
        "q": values.draw(case.shape, SAME, case.layout, case.scale),
        "k": values.draw(k_shape, SAME, case.k_layout, case.scale),
        "cos": values.draw(shape, dtype, case.table_layout, case.scale),
        "sin": values.draw(shape, dtype, "contiguous", case.scale),
        "dq": values.draw(case.shape, SAME, case.dy_layout, case.scale),
        "dk": values.draw(k_shape, SAME, case.k_layout, case.scale),
    }
    if case.kind == "complex":
        drawn["cos"] = laid_out(torch.complex(drawn["cos"], drawn["sin"]), case.table_layout)
    if case.kind != "real":
        drawn["sin"] = None
    return drawn


def largest_turn(tensors: Tensors) -> float:
    """Return the largest factor by which a rotation can grow an element."""
    cos, sin = tensors["cos"], tensors["sin"]
    if cos.is_complex():
        cos, sin = cos.real, cos.imag
    return max_abs(cos) + max_abs(sin)


def magnitudes(names: tuple[str, str], case: Any, tensors: Tensors) -> list[float]:
    turn = largest_turn(tensors)
    return [max_abs(tensors[name]) * turn for name in names]


# The tables of a batch are not permuted with its heads.
ROWS: dict[str, Any] = {
    "rowwise": ("q", "k", "dq", "dk"), "rows_permute": lambda case: case.tables != "batch",
}  # fmt: skip
HEADS = {"k_heads": 8, "layout": "model", "k_layout": "model", "tables": "batch"}
FEW = {"k_heads": 1, "layout": "contiguous"}
# Batches of a partial rotation, with tables for each; k laid out as in a model.
SAMPLED = {
    "k_heads": 1, "tables": "batch", "rotary": 4, "table_dtype": SAME, "k_layout": "model",
}  # fmt: skip
COMPILED = ((128, 128), (96, 24), (256, 256))


def heads(*sizes: tuple[int, int, int], sections: bool = False, **more: Any) -> list[Fields]:
    """Return forms of models' shapes. With `sections`, each gets a third of the pairs."""
    forms = []
    for count, D, R in sizes:
        third = R // 2 // 3
        cut = {"sections": (R // 2 - 2 * third, third, third)} if sections else {}
        forms.append({"shape": (2, count, 2048, D), "rotary": R, **more, **cut})
    return forms


INTERLEAVED = {"interleaved": True}
# Forms of tables, each of which a kernel reads in its own way.
TABLE_FORMS: dict[str, Fields] = {
    "per-pair": {"per_pair": True},
    "strided": {"per_pair": True, "table_layout": "strided"},
    "complex": {"kind": "complex"},
    "complex-strided": {"kind": "complex", "table_layout": "strided"},
    "sections": {"sections": (16, 24, 24)},
    "odd-sections": {"sections": (0, 13, 51)},
    "interleaved-sections": {"sections": (16, 24, 24), "interleaved": True},
    "complex-sections": {"kind": "complex", "sections": (16, 24, 24)},
    "matrices": {"kind": "matrices", "table_dtype": FP32},
    "matrices-strided": {"kind": "matrices", "table_layout": "strided"},
    "deinterleave": {"interleaved": True, "deinterleave": True},
    "deinterleave-per-pair": {"interleaved": True, "per_pair": True, "deinterleave": True},
    "deinterleave-matrices": {"kind": "matrices", "deinterleave": True},
}


def planned(sizes: dict[str, Fields], **common: Any) -> dict[str, Fields]:
    """Return cases of models' sizes and layouts, with the host code's own plan."""
    heads = {
        "dtype": BF16, "k_heads": 2, "table_dtype": SAME, "layout": "model", "k_layout": "model",
    }  # fmt: skip
    return {name: {**heads, **common, **fields} for name, fields in sizes.items()}


PLANNED = {
    **planned(
        {
            f"{name}-interleaved" if interleaved else name: {
                "shape": shape, "rotary": rotary, "interleaved": interleaved,
            }
            for name, shape, rotary in (
                ("llama", (2, 16, 9, 128), 128), ("partial", (1, 9, 17, 96), 24),
                ("wide", (1, 2, 3, 6002), 6002), ("mostly-copied", (1, 1, 2, 601), 2),
            )
            for interleaved in (False, True)
        },
        tables="one",
    ),
    **planned(
        {
            f"{name}-{D}": {"shape": (2, 4, 3, D), **form}
            for name, form in TABLE_FORMS.items()
            for D in (128, 160)
        },
        tables="batch", rotary=128,
    ),
}  # fmt: skip


def rope(
    form: str, needed: int, sampled: Fields, *options: Fields, launched: Fields | None = None,
    backward: tuple[Fields, ...] = (), compiled: tuple[Fields, ...] = ({},),
) -> OpUnderTest:  # fmt: skip
    sections = bool(sampled.get("sections"))
    models = ((32, 128, 128), (32, 96, 24), (8, 256, 256), (8, 64, 64), (8, 8192, 8190))
    small = heads((3, 90, 80), (3, 64, 64), sections=sections, **{**FEW, **(launched or {})})
    small = [{**form, "shape": (2, 3, 5, form["shape"][-1])} for form in small]
    small[0]["tile"] = (2, 16)
    return OpUnderTest(
        name="rope",
        form=form,
        choices=CHOICES,
        coupled=rotations,
        tensors=tensors,
        needed=needed,
        output_magnitudes=partial(magnitudes, ("q", "k")),
        gradient_magnitudes=partial(magnitudes, ("dq", "dk")),
        # Dynamo treats equal sizes as one, so the batch differs from all other sizes, including
        # that of three tables.
        sample_shape=lambda rows: (rows + 2 * sections, 2, 2, 8),
        sampled={**SAMPLED, **sampled},
        cases={} if form else PLANNED,
        forms=Forms(
            shapes=heads(*models, sections=sections, **launched or {}), options=options,
            backward_options=backward, optional_at=(0, 1, 4),
            counted={0: {"shape": (1, 32, 64, 128)}, 1: {"shape": (1, 32, 64, 96)}}, executed=small,
            common=HEADS,
        ),
        compiled=[
            {
                "shape": (2, 32, 3, D), "rotary": R, **more,
                **({"sections": (R // 2 - 8, 8, 0)} if sections else {}),
            }
            for D, R in COMPILED
            for more in compiled
        ],
        **ROWS,
        shaping=(),
        autocast_as="mul.Tensor",
    )  # fmt: skip


# q or k, its weight, and the gradient of its result.
TRIPLES = (("q", "q_weight", "dq"), ("k", "k_weight", "dk"))


def norm_magnitudes(case: Any, tensors: Tensors) -> list[tuple[float, float, float]]:
    """Return the magnitudes of the result, of dx and of dweight, for q and for k."""
    turn = max(1.0, largest_turn(tensors))
    results = []
    for name, weight, gradient in TRIPLES:
        x, dy = (tensors[key].double() for key in (name, gradient))
        if x.numel() == 0:
            results.append((0.0, 0.0, 0.0))
            continue
        rstd = float((x.square().mean(-1) + case.eps).rsqrt().max())
        scale = max_abs(tensors[weight], 1.0) + abs(case.offset)
        normalised = rstd * max_abs(x)
        of_dy = turn * max_abs(dy)
        terms = turn * float(dy.abs().sum() / x.shape[-1])
        results.append(
            (
                normalised * scale * turn,
                rstd * scale * of_dy * (1 + normalised),
                terms * (1 + normalised),
            )
        )
    return results


def norm_gradient_magnitudes(case: Any, tensors: Tensors) -> list[float]:
    (_, dq, dq_weight), (_, dk, dk_weight) = norm_magnitudes(case, tensors)
    return [dq, dk, dq_weight, dk_weight]


def norm_tensors(case: Any) -> Tensors:
    values = drawn_for(case, 1)
    weights = (("q_weight", case.q_weight_dtype), ("k_weight", case.k_weight_dtype))
    return {**tensors(case), **{name: values.draw(case.shape[-1:], d) for name, d in weights}}


def norms_and_rotations(pick: Pick, fields: Fields) -> Fields:
    weighted = fields["q_weight_dtype"] and fields["k_weight_dtype"]
    return {**rotations(pick, fields), "offset": fields["offset"] if weighted else 0.0}


WEIGHTED = {"q_weight_dtype": SAME, "k_weight_dtype": SAME}
RMS_NORM_ROPE = OpUnderTest(
    name="rms_norm_rope",
    choices={
        **CHOICES, "q_weight_dtype": PARAMETER, "k_weight_dtype": PARAMETER, "eps": EPS,
        "offset": (0.0, 1.0), "casting_mode": MODES,
    },
    coupled=norms_and_rotations,
    tensors=norm_tensors,
    needed=4,
    gradients=("q", "k", "q_weight", "k_weight"),
    output_magnitudes=lambda c, t: [result for result, _, _ in norm_magnitudes(c, t)],
    gradient_magnitudes=norm_gradient_magnitudes,
    sample_shape=lambda rows: (rows, 2, 2, 8),
    sampled={**SAMPLED, **WEIGHTED},
    cases={
        **planned(
            {
                "qwen3": {"shape": (2, 12, 5, 128), "rotary": 128},
                "gemma3": {
                    "shape": (1, 4, 9, 256), "k_heads": 1, "rotary": 256, "offset": 1.0,
                    "casting_mode": "gemma",
                },
                "partial": {"shape": (1, 3, 5, 256), "rotary": 64},
                "interleaved": {"shape": (1, 3, 5, 96), "rotary": 32, "interleaved": True},
                # The kernels of rms_norm and rope, one after the other.
                "wide": {"shape": (1, 2, 2, 2100), "k_heads": 1, "rotary": 2098},
            },
            tables="one", **WEIGHTED,
        ),
        # A tile is padded with rows of zeros, whose 1 / rms is infinite without an eps.
        "zero-eps": {
            "shape": (1, 3, 3, 20), "dtype": FP32, "rotary": 12, "tile": (2, 16), "eps": 0.0,
            **WEIGHTED,
        },
    },
    # Heads of models, with and without elements after the pairs; and heads that fit no tile.
    forms=Forms(
        shapes=heads(
            (32, 128, 128), (8, 256, 256), (16, 256, 64), (8, 8192, 8190),
            q_weight_dtype=BF16, k_weight_dtype=BF16,
        ),
        options=(
            INTERLEAVED, {"sections": (20, 20, 24)}, {"per_pair": True, "table_dtype": FP32},
            {"kind": "complex", "table_dtype": FP32}, {"casting_mode": "none"},
            {"casting_mode": "gemma", "offset": 1.0}, {"layout": "sliced"},
            {"q_weight_dtype": None},
        ),
        backward_options=tuple(
            {"output_mask": tuple(i in subset for i in range(4))}
            for subset in ((0, 1), (2, 3), (0,))
        ),
        counted={0: {"shape": (1, 32, 64, 128)}, 1: {"shape": (1, 8, 64, 256)}},
        executed=(
            {"shape": (1, 2, 5, 138), "rotary": 128, "tile": (2, 64), **FEW},
            {"shape": (2, 3, 5, 64), "rotary": 64, **FEW},
        ),
        common=HEADS,
    ),
    compiled=[
        {"shape": (2, 32, 3, D), "rotary": R, **more}
        for D, R in COMPILED
        for more in ({}, {"casting_mode": "none"}, INTERLEAVED)
    ],
    **ROWS,
    shaping=(),
    autocast_as="rms_norm",
)  # fmt: skip

OPS = (
    rope(
        "", 4, {}, INTERLEAVED, {"tables": "one"}, {"table_dtype": FP32}, {"layout": "sliced"},
        backward=masks(2), compiled=({}, INTERLEAVED),
    ),
    rope("per-pair", 6, {"per_pair": True}, INTERLEAVED),
    rope(
        "complex", 3, {"kind": "complex"}, INTERLEAVED,
        launched={"table_dtype": FP32}, compiled=({"interleaved": True, "per_pair": True},),
    ),
    rope("sections", 7, {"sections": (1, 1, 0)}),
    rope(
        "sections-per-pair", 7, {"sections": (1, 0, 1), "interleaved": True, "per_pair": True},
        {"interleaved": False}, compiled=(),
    ),
    # One table for the batch, as in Flux. PyTorch reorders it, which the traffic does not count.
    rope("matrices", 3, {"kind": "matrices"}, launched={"table_dtype": FP32, "tables": "none"},
         compiled=({"tables": "batch", "table_dtype": FP32},)),
    rope("deinterleave", 8, {"interleaved": True, "deinterleave": True}, {"per_pair": True},
         compiled=({"per_pair": True},)),
    RMS_NORM_ROPE,
)  # fmt: skip
