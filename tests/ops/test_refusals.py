"""Ops refuse values that its options may not have, wrong shapes, and its own checks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import liger_ops
import op_checks
from liger_ops import library
from liger_ops.accepted import FINITE_AT_LEAST_0, Accepted, one_of
from op_table import OPS
from op_under_test import INF, NAN, OpUnderTest

WRONG: dict[str, tuple[Any, ...]] = {
    "a number of at least 0": (-1.0, NAN),
    "at least 1": (0, -1),
    "at least 0, or -1 for no bound": (-2,),
    "above 0 or None": (0, -1),
    "a number above 0": (0.0, -1.0, NAN, INF),
    "a finite number": (NAN, INF),
    "from 0 to 1": (1.5, -0.1, NAN),
}
TYPES = ("float", "Optional[float]", "str")
CASES = [
    pytest.param(op, option, id=f"{op.name}-{option}")
    for op in {op.name: op for op in OPS.values()}.values()
    for option in library.declared(library.OPS[op.name]).options
]
# What modules need to be made.
SIZES = {"num_groups": 2, "num_channels": 8, "intermediate_size": 8, "hc": 2, "top_k": 1}


def modules_with(op: OpUnderTest, option: str) -> list[type[nn.Module]]:
    name = op.base.replace("_", "")
    classes = (getattr(liger_ops.nn, each) for each in liger_ops.nn.__all__)
    return [
        cls
        for cls in classes
        if cls.__name__.lower().removesuffix("loss") == name
        and option in inspect.signature(cls).parameters
    ]


@pytest.mark.parametrize(("op", "option"), CASES)
def test_a_value_that_an_option_may_not_have(op: OpUnderTest, option: str) -> None:
    """Is refused eagerly, in tracing, compiled, and when a module is made."""
    values = library.declared(library.OPS[op.name]).options[option]
    if isinstance(values, Accepted):
        text, wrong_values = values.text, WRONG[values.text]
        wrong_values += (INF,) if values is FINITE_AT_LEAST_0 else ()
    else:
        text, wrong_values = one_of(values).text, ("other",)
    case = op.sample(torch.float32)
    tensors = op.tensors(case)
    names = [argument.name for argument in op.overload()._schema.arguments]
    for i, wrong in enumerate(wrong_values):
        args = list(op.forward_args(case, tensors))
        args[names.index(option)] = wrong
        message = f"{option} must be {text}, got {wrong!r}"
        if i == 0:
            op_checks.assert_rejects(op, tuple(args), message)
        with pytest.raises(ValueError, match="must be") as error:
            op.overload()(*args)
        assert message in str(error.value)
        for module in modules_with(op, option):
            parameters = inspect.signature(module).parameters.values()
            sizes = {p.name: SIZES.get(p.name, 8) for p in parameters if p.default is p.empty}
            with pytest.raises(ValueError, match="must be") as error:
                module(**sizes | {option: wrong})
            assert message in str(error.value)


# Numbers that may have any value.
ANY_NUMBER = {
    "offset", "alpha", "up_offset", "pre_eps", "post_mult", "gate_multiplier", "down_multiplier",
    "scale", "gate_up_lora_scale", "down_lora_scale",
}  # fmt: skip


def test_every_number_and_word_is_declared() -> None:
    for op in OPS.values():
        options = {a.name for a in op.overload()._schema.arguments if str(a.type) in TYPES}
        undeclared = options - library.declared(library.OPS[op.name]).options.keys() - ANY_NUMBER
        assert not undeclared, op.name


QKV = ("query", "key", "value")
COMPLEX, MATRICES, THREE = torch.zeros(2, 4).cfloat(), (2, 4, 2, 2), (3, 1, 2, 8)
WITHOUT_LORA = {"gate_up_lora_a": None, "gate_up_lora_b": None}
OF_SCALE = "scale must be (N,), or x's first dimensions and N, for x of"
OF_STREAMS = "x must be (..., hc, C), with 1 to 64 streams and at least one channel, got shape"
OF_GROUPS = "groups must divide the 2 channels of scores and the 4 rows of weight, got"
OF_SIZES = "weight, stride, padding and dilation must give as many columns as rows, and at least"
OF_LENGTHS = "for q's S of 2 and B of 3, got shape"
OF_SHIFTED = "kernel_size * dilation must be at most the 4 positions of the dimension if border is"
OF_K = "k must have the shape of (B, H', S, D) for q of (B, H, S, D), (3, 1, 2, 8), got"
OF_SECTIONS = "sections must be three counts of pairs that add up to R/2, 4, got"
# The id of an entry -> changes of its sample's arguments, and the message. Tensors are given by
# their shapes.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    # The words for each kind of line. Of every tensor, test_every_op.py has a wrong one refused.
    "dyt": [({"alpha": (2,)}, "alpha must have one element, got shape (2,)")],
    "fused_add_rms_norm": [
        ({"residual": (3, 7)}, "residual must have the shape of x, (3, 2, 7), got (3, 7)"),
    ],
    "poly_norm": [({"weight": (7,)}, "weight must have the shape of (3,), (3,), got (7,)")],
    "layer_norm": [
        ({"bias": (1, 7)}, "bias must have the shape of x's last dimension, (7,), got (1, 7)"),
    ],
    "kl_div": [({"input": ()}, "input must be (..., V), got shape ()")],
    "swiglu-packed": [
        ({"gate": (2, 7)}, "gate must be (..., 2N) without up, which it then holds, got shape (2,"),
    ],
    "tiled_mlp_forward": [
        ({"gate_weight": (7, 3)}, "gate_weight must have the shape of (I, D) for x of (..., D), ("),
        ({"gate_bias": (4,)}, "gate_bias must have the shape of gate_weight's rows, (7,), got (4,"),
        # A ValueError, unlike those of other ops' dtypes.
        ({"up_bias": torch.zeros(7).half()}, "up_bias must have x's "),
    ],
    "mhc_coeffs_forward": [
        ({"phi": (14, 7)}, "phi must have the shape of (hc * C, hc * hc + 2 * hc), (14, 8), got ("),
        ({"alpha_res": (1,)}, "alpha_res must have the shape of a number, (), got (1,)"),
    ],
    "log_prob_forward": [
        ({"target": (3,)}, "target must be int64 or int32, got torch.float32"),
        ({"logits": (3, 2, 0)}, "logits must have at least one class, got (3, 2, 0)"),
    ],
    # The words of ops' own checks.
    "rms_norm": [
        ({"weight": None, "offset": 1.0}, "offset must be 0 without weight, to which it is"),
    ],
    "gated_rms_norm": [({"group_size": 4}, "group_size must be a divisor of x's 6 columns, got 4")],
    "group_norm": [
        ({"num_groups": n}, f"num_groups must be a divisor of x's 6 channels, got {n}")
        for n in (4, 0)
    ],
    "modulated_layer_norm-sample": [
        ({"scale": (2, 7)}, OF_SCALE), ({"scale": (1, 3, 7)}, OF_SCALE),
        ({"x": (3, 7), "scale": (2, 7)}, OF_SCALE),
        ({"shift": (7,)}, "shift must have the shape of scale, (3, 7), got (7,)"),
    ],
    "modulated_rms_norm-sample": [({"scale": (2, 7)}, OF_SCALE)],
    "clamped_swiglu": [({"interleaved": True}, "interleaved must be False with an up beside gate")],
    "attn_res": [({"x": (0, 3, 6)}, "x must have at least one block, got shape (0, 3, 6)")],
    "embedding": [
        ({"padding_idx": i}, f"padding_idx must be an index of 5 rows, got {i}") for i in (5, -6)
    ],
    "mhc_pre": [
        ({"x": (2, 65, 4), "h_pre": (2, 65)}, f"{OF_STREAMS} (2, 65, 4)"),
        ({"x": (2, 3, 0), "h_pre": (2, 3)}, f"{OF_STREAMS} (2, 3, 0)"),
    ],
    "moe_experts_forward": [
        ({**WITHOUT_LORA, "gate_up": (7, 5, 4), "gate_up_bias": None}, "gate_up must have 22"),
        ({"gate_up_lora_a": None}, "gate_up_lora_a must be given with gate_up_lora_b, got None"),
        ({"activation": "relu_squared", "interleaved": True}, "interleaved must be False without"),
    ],
    "lora_linear_forward": [
        ({"a": torch.zeros(6, 4).half(), "b": torch.zeros(11, 6).half()},
         "a must have x's dtype, torch.float32, or a wider one, got torch.float16"),
    ],
    "cross_entropy_forward-mean": [
        ({"logits": (3, 2, 0), "weight": None}, "logits must have at least one class, got (3,"),
        ({"reduction": "sum"}, "num_items_in_batch must be None but for the reduction 'mean',"),
    ],
    "divergence_forward-jsd": [
        (dict.fromkeys(("student_logits", "teacher_logits"), (3, 2, 0)),
         "student_logits must have at least one class, got (3, 2, 0)"),
    ],
    "rope": [
        ({"q": (2, 3, 8)}, "q must be (B, H, S, D), got shape (2, 3, 8)"),
        ({"k": (3, 1, 1, 8)}, f"{OF_K} (3, 1, 1, 8)"),
        ({"k": torch.zeros(3, 1, 2, 8).half()}, "k must have q's dtype, torch.float32, got"),
        ({"cos": (1, 8)}, f"cos must be (S, R), (1, S, R) or (B, S, R) {OF_LENGTHS} (1, 8)"),
        ({"cos": THREE}, f"cos must be (S, R), (1, S, R) or (B, S, R) {OF_LENGTHS} (3, 1, 2, 8)"),
        *(
            (changes, f"cos must be (S, R/2), (1, S, R/2) or (B, S, R/2) {OF_LENGTHS} (1, ")
            for changes in ({"cos": COMPLEX[:1], "sin": None}, {"cos": (1, 8), "per_pair": True})
        ),
        (
            {"cos": (2, 8), "sin": (2, 8), "sections": [1, 1, 2]},
            f"cos must be (3, 1, S, R) or (3, B, S, R), with sections, {OF_LENGTHS} (2, 8)",
        ),
        ({"cos": (2, 5)}, "cos must have an even number of columns from 2 to q's D of 8, got 5"),
        ({"cos": (2, 8), "per_pair": True}, "cos must have from 1 column to half of q's D of 8,"),
        ({"cos": (2, 8), "sin": (2, 4)}, "sin must have the shape of cos, (2, 8), got (2, 4)"),
        ({"sin": None}, "sin must be given with a real cos, except matrices (..., S, R/2, 2, 2),"),
        (
            {"cos": (3, 4, 2, 2), "sin": None},
            "cos must be (S, R/2, 2, 2), (1, S, R/2, 2, 2) or (B, S, R/2, 2, 2)"
            f" {OF_LENGTHS} (3, 4, 2, 2)",
        ),
        ({"cos": (2, 5, 2, 2), "sin": None}, "cos must have from 1 column to half of q's D of 8,"),
        (
            {"cos": (3, *MATRICES), "sin": None, "sections": [1, 1, 2]},
            "sections must be None with matrices, got [1, 1, 2]",
        ),
        ({"deinterleave": True}, "deinterleave must be False with interleaved=False, for pairs in"),
        ({"cos": COMPLEX}, "sin must be None with a complex cos, which holds it, got a tensor of"),
        (
            {"cos": torch.zeros(2, 4, dtype=torch.complex32), "sin": None},
            "a complex cos must be torch.complex64 or torch.complex128, got torch.complex32",
        ),
        ({"sin": COMPLEX}, "sin must be a floating point tensor, got torch.complex64"),
        *(
            ({"cos": THREE, "sin": THREE, "sections": sections}, f"{OF_SECTIONS} {sections}")
            for sections in ([1, 1, 1], [5, -1, 0], [2, 2])
        ),
    ],
    "rms_norm_rope": [
        ({"k": (2, 1, 2, 8)}, OF_K),
        ({"cos": (1, 8)}, "cos must be (S, R), (1, S, R) or (B, S, R) for q's S of 2 and B of 3"),
        ({"k_weight": (4,)}, "k_weight must have the shape of (D,) for q of (B, H, S, D), (8,),"),
        ({"k_weight": None, "offset": 1.0}, "offset must be 0 without k_weight, to which it is"),
        ({"q_weight": torch.zeros(8).long()}, "q_weight must be a floating point tensor, got"),
    ],
    "multi_token_attention_forward": [
        ({"scores": (2, 4, 4)}, "scores must be (B, C, L, L), with L at least 1, got shape (2, 4,"),
        ({"scores": (3, 2, 4, 3)}, "scores must be (B, C, L, L), with L at least 1, got shape (3,"),
        (
            {"weight": (1, 2, 2)},
            "weight must be (E, G, P, Q), none of them 0, got shape (1, 2, 2)",
        ),
        ({"weight": (4, 2, 2, 2)}, "weight must be (E, 1, P, Q) for 2 channels of scores and"),
        ({"groups": 4}, f"{OF_GROUPS} 4"),
        ({"bias": (3,)}, "bias must have the shape of (E,) for weight of (E, G, P, Q), (4,),"),
        ({"bias": torch.zeros(4).half()}, "bias must have weight's dtype, torch.float32, got"),
        ({"stride": [0]}, "stride must be one or two ints of at least 1, got [0, 0]"),
        ({"padding": [1] * 3}, "padding must be one or two ints of at least 0, got [1, 1, 1]"),
        ({"padding": [0, 1]}, OF_SIZES), ({"dilation": [7]}, OF_SIZES),
    ],
    "neighborhood_attention_forward-line": [
        ({"kernel_size": [4]}, "kernel_size must be odd if border is 'clipped' and the dimension"),
        ({"kernel_size": [0]}, "kernel_size must be at least 1, got [0]"),
        ({"dilation": [0]}, "dilation must be at least 1, got [0]"),
        ({"is_causal": [2]}, "is_causal must be True or False, got [2]"),
        ({"kernel_size": [3, 3]}, "kernel_size must be one value or one for each of 1"),
        ({"border": "shifted"}, f"{OF_SHIFTED} 'shifted', got 3 * 2"),
        ({"query": (6, 8)}, "query must be (B, H, *spatial, D), got shape (6, 8)"),
        (dict.fromkeys(QKV, (3, 1, 4)), "query must have one or two spatial dimensions, got shape"),
        (dict.fromkeys(QKV, (3, 1, 4, 257)), "query must have from 1 to 256 elements in its last"),
        ({"key": (3, 1, 5, 1)}, "key must have the shape of (B, H', *spatial, D) for query of"),
        ({"key": (3, 3, 4, 1), "value": (3, 3, 4, 1)}, "the heads of key must divide the 2 of"),
        ({"key": torch.zeros(3, 1, 4, 1).half()}, "key must have query's dtype, torch.float32,"),
    ],
    "varlen_attention_forward": [
        ({"query": (6, 8)}, "query must be (T, H, D), got shape (6, 8)"),
        ({"key": (4, 1, 4)}, "key must have the shape of (T, H', D) for query of (T, H, D), (3,"),
        ({"value": (3, 2, 6)}, "value must have the shape of"),
        ({"query": (3, 2, 257), "key": (3, 1, 257)}, "query must have from 1 to 256 elements in"),
        ({"value": (3, 1, 0)}, "value must have from 1 to 256 elements in its last dimension, got"),
        ({"key": (3, 3, 4), "value": (3, 3, 6)}, "the heads of key must divide the 2 of query,"),
        ({"key": torch.zeros(3, 1, 4).half()}, "key must have query's dtype, torch.float32, got"),
        ({"cu_seqlens": (9,)}, "cu_seqlens must be int64 or int32, got torch.float32"),
        ({"cu_seqlens": torch.zeros(0).int(), "lengths": None}, "cu_seqlens must have at least"),
        ({"lengths": torch.zeros(7).int()}, "lengths must have 8 elements, one for each document"),
        ({"sinks": (3,)}, "sinks must have the shape of"),
        ({"bounds": torch.zeros(2).int()}, "bounds must be int64, got torch.int32"),
        ({"bounds": torch.zeros(3).long()}, "bounds must have 2 elements, or 20 for 9 of"),
        ({"bounds": torch.zeros(2).long().to("meta")}, "bounds must be on the CPU, got meta"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        pytest.param(name, *row, id=f"{name}-{'-'.join(row[0])}")
        for name, rows in REFUSED.items()
        for row in rows
    ],
)
def test_what_an_op_refuses(name: str, changes: dict[str, Any], message: str) -> None:
    op = OPS[name]
    case = op.sample(torch.float32)
    names = [argument.name for argument in op.overload()._schema.arguments]
    given = dict(zip(names, op.forward_args(case, op.tensors(case)), strict=True))
    assert changes.keys() <= given.keys()
    shaped = {n: torch.zeros(v) if isinstance(v, tuple) else v for n, v in changes.items()}
    op_checks.assert_rejects(op, tuple({**given, **shaped}.values()), message)
