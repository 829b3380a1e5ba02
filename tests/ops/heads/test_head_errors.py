"""Losses of hidden states and a head refuse wrong arguments, eagerly and in tracing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import liger_ops
from head_calls import call, leaves
from linear_cross_entropy_cases import HeadCase

BF16, NAN = torch.bfloat16, float("nan")
X, WEIGHT, TARGET = torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2, dtype=torch.int64)
A, B, LORA_X = torch.zeros(4, 3), torch.zeros(5, 4), torch.zeros(2, 4)
IDS = torch.zeros(2, 1, dtype=torch.int64)
HEAD = {"x": X, "weight": WEIGHT, "target": TARGET}
STUDENT = {"student_x": X, "student_weight": WEIGHT, "target": TARGET}
TEACHER = {"teacher_x": X, "teacher_weight": WEIGHT}
SAMPLED = {
    **HEAD, "words": IDS, "sampling_top_log_prob": torch.zeros(2, 1), "advantages": X[:, 0],
}  # fmt: skip
GIVEN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("linear_cross_entropy", "linear_cross_entropy_forward"), HEAD),
    **dict.fromkeys(("linear_log_prob", "linear_log_prob_forward"), HEAD),
    **dict.fromkeys(("linear_score_centering", "linear_score_centering_forward"), SAMPLED),
    "linear_divergence": {**STUDENT, "teacher_logits": torch.zeros(2, 6)},
    "linear_divergence_forward": {**STUDENT, **TEACHER},
    "linear_top_k_divergence": {
        "x": X, "weight": WEIGHT, "teacher_ids": IDS, "teacher_log_prob": torch.zeros(2, 1),
    },
}  # fmt: skip
# Changed arguments, and words of the message. That of a TypeError names a dtype.
Rows = tuple[tuple[dict[str, Any], str], ...]
LORA: Rows = (
    ({"lora_a": A}, "lora_b must be given with lora_a, got None"),
    ({"lora_b": B}, "lora_a must be given with lora_b, got None"),
    ({"lora_a": A[:, :2], "lora_b": B}, "lora_a must be (R, D) with D of x, (4, 3), got (4, 2)"),
    ({"lora_a": A[0], "lora_b": B}, "lora_a must be (R, D) with D of x, (3, 3), got (3,)"),
    ({"lora_a": A, "lora_b": B[:4]}, "lora_b must be (V, R) with V of weight and R of lora_a, (5,"),
    ({"lora_a": A[:2], "lora_b": B}, "lora_b must be (V, R) with V of weight and R of lora_a, (5,"),
    ({"lora_a": A.long(), "lora_b": B}, "lora_a must be a floating point tensor, got torch.int64"),
    ({"lora_a": A, "lora_b": B.to("meta")}, "lora_b must be on x's device, cpu, got meta"),
)
LORA_OF_FORWARD: Rows = (
    ({"lora_x": LORA_X}, "lora_b must be given with lora_x, got None"),
    ({"lora_b": B}, "lora_x must be given with lora_b, got None"),
    ({"lora_x": LORA_X[:1], "lora_b": B}, "lora_x must have the shape of x but for its last"),
    ({"lora_x": LORA_X, "lora_b": B[:, :2]}, "lora_b must have the shape of weight but for its la"),
    ({"lora_x": LORA_X.double(), "lora_b": B}, "lora_x must have x's dtype, torch.float32"),
    ({"lora_x": LORA_X, "lora_b": B.long()}, "lora_b must be a floating point tensor"),
)
REFUSED: dict[str, Rows] = {
    "linear_cross_entropy": (
        *LORA,
        ({"weight": WEIGHT.to(BF16)}, "weight must have x's dtype, torch.float32, got"),
        ({"bias": torch.zeros(5).to(BF16)}, "bias must have x's dtype, torch.float32, got"),
        ({"weight": B}, "weight must have the shape of (V, D) for x of (..., D), (5, 3), got (5,"),
        ({"weight": WEIGHT[0]}, "weight must be (V, D), got shape (3,)"),
        ({"weight": WEIGHT[:0]}, "weight must have at least one class, got (0, 3)"),
        ({"x": torch.tensor(1.0)}, "x must be (..., D), got shape ()"),
        ({"target": TARGET[:1]}, "target must have the shape of x but for its last dimension,"),
        ({"target": X[:, 0]}, "target must be int64 or int32, got torch.float32"),
        ({"bias": X[0]}, "bias must have the shape of weight's rows, (5,), got (3,)"),
        ({"class_weight": X[0]}, "class_weight must have the shape of weight's rows, (5,), got"),
        ({"accum_dtype": BF16}, "accum_dtype must be torch.float32 or None, got torch.bfloat16"),
    ),
    "linear_cross_entropy_forward": LORA_OF_FORWARD,
    "linear_log_prob": (
        *LORA,
        ({"weight": B}, "weight must have the shape of (V, D) for x of (..., D), (5, 3), got (5,"),
        ({"accum_dtype": torch.float16}, "accum_dtype must be torch.float32 or None"),
        ({"weight": WEIGHT.double()}, "weight must have x's dtype, torch.float32"),
    ),
    "linear_log_prob_forward": LORA_OF_FORWARD,
    "linear_score_centering": (
        *LORA,
        ({"words": IDS[:1]}, "words must have the shape of x but for its last dimension,"),
        ({"words": IDS.float()}, "words must be int64 or int32, got torch.float32"),
        ({"sampling_top_log_prob": X}, "sampling_top_log_prob must have the shape of words, (2"),
        ({"sampling_top_log_prob": IDS}, "sampling_top_log_prob must be a floating point tensor"),
        ({"advantages": X}, "advantages must have the shape of target, (2,), got (2, 3)"),
        ({"sampling_log_prob": X}, "sampling_log_prob must have the shape of target, (2,), got (2"),
        ({"importance_sampling": "clip"}, "importance_sampling must be one of 'none', 'trunc"),
        ({"importance_min": -1.0}, "importance_min must be a number of at least 0, got -1.0"),
        ({"importance_min": 3.0}, "importance_max must be at least importance_min, 3.0, got 2.0"),
        ({"importance_max": -0.5}, "importance_max must be a number of at least 0, got -0.5"),
        ({"importance_max": NAN}, "importance_max must be a number of at least 0, got nan"),
        ({"reduction": "batchmean"}, "reduction must be one of 'none', 'mean', 'sum', got 'batch"),
        ({"reduction": "sum", "num_items_in_batch": torch.tensor(3)}, "num_items_in_batch must be"),
        ({"accum_dtype": torch.float16}, "accum_dtype must be torch.float32 or None"),
        ({"weight": WEIGHT[:0]}, "weight must have at least one class, got (0, 3)"),
    ),
    "linear_score_centering_forward": (
        *LORA_OF_FORWARD,
        ({"gradient_mask": [False, False, True, False, False]}, "gradient_mask[2] must be False"),
        ({"gradient_mask": [True] + 4 * [False], "reduction": "none"}, "gradient_mask must be all"),
    ),
    "linear_divergence": (
        ({"teacher_logits": None}, "the teacher must be given by teacher_logits or by teacher_x"),
        ({"teacher_x": X}, "not both, got teacher_x beside teacher_logits"),
        ({"teacher_logits": None, "teacher_x": X}, "teacher_weight, got teacher_x"),
        ({"teacher_logits": torch.zeros(3, 6)}, "teacher_logits must have the shape of student_x"),
        ({"teacher_logits": torch.zeros(2, 0)}, "teacher_logits must have at least one class"),
        ({"student_weight": B}, "student_weight must have the shape of (V, D) for"),
        ({"target": None, "hard_weight": 1.0}, "hard_weight must be 0 without a target, got 1.0"),
        ({"token_weight": torch.zeros(3)}, "token_weight must have the shape of target, (2,)"),
        ({"accum_dtype": torch.float16}, "accum_dtype must be torch.float32 or None"),
        ({"student_lora_a": A}, "student_lora_b must be given with student_lora_a, got None"),
        ({"student_lora_b": B}, "student_lora_a must be given with student_lora_b, got None"),
        ({"student_lora_a": A[:, :2], "student_lora_b": B}, "student_lora_a must be (R, D) with"),
        ({"teacher_lora_a": A}, "must be None without teacher_x and teacher_weight"),
    ),
    "linear_divergence_forward": (
        ({"student_lora_x": LORA_X}, "student_lora_b must be given with student_lora_x, got None"),
        ({"student_lora_x": LORA_X[:1], "student_lora_b": B}, "student_lora_x must have the"),
        ({"teacher_lora_x": LORA_X, "teacher_lora_b": B[:, :2]}, "teacher_lora_b must have the"),
        ({"gradient_mask": [True, True, False, True, False]}, "gradient_mask[3] must be False"),
    ),
    "linear_top_k_divergence": (
        ({"teacher_ids": IDS.float()}, "teacher_ids must be int64 or int32"),
        ({"teacher_ids": IDS[:, :0]}, "teacher_ids must be (..., K) with at least"),
        ({"teacher_ids": IDS[:1]}, "teacher_log_prob must have the shape of teacher_i"),
        ({"teacher_log_prob": IDS}, "teacher_log_prob must be a floating point tensor"),
        ({"target": IDS}, "target must have the shape of teacher_ids but for its last"),
        ({"target": IDS[:, 0].bool()}, "target must be int64 or int32, got torch.bool"),
        ({"x": torch.zeros(3, 3)}, "teacher_ids must have the shape of x but for its"),
        ({"weight": B}, "weight must have the shape of (V, D) for x"),
        ({"kind": "cosine"}, "kind must be one of 'forward_kl', 'reverse_kl', 'jsd'"),
        ({"beta": -0.1}, "beta must be from 0 to 1, got -0.1"),
        ({"tail": "none"}, "tail must be one of 'bucket', 'zero', 'drop', got 'none'"),
        ({"kind": "reverse_kl", "tail": "zero"}, "tail must be 'bucket' or 'drop' for"),
        ({"beta": 1.0, "tail": "zero"}, "tail must be 'bucket' or 'drop' for reverse"),
        ({"lora_a": A}, "lora_b must be given with lora_a, got None"),
    ),
}
OF_DTYPES = ("dtype", "floating point", "int64 or int32")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [(name, *row) for name, rows in REFUSED.items() for row in rows],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rejects(name: str, change: dict[str, Any], message: str) -> None:
    given = {**GIVEN[name], **change}
    error = TypeError if any(words in message for words in OF_DTYPES) else ValueError
    if "accum_dtype" in message:
        error = ValueError
    op = getattr(liger_ops, name)
    with pytest.raises(error) as eager:
        op(**given)
    assert str(eager.value).startswith(f"{name.removesuffix('_forward')}: ")
    assert message in str(eager.value)
    if any(isinstance(value, Tensor) and value.is_meta for value in given.values()):
        return
    with FakeTensorMode() as mode, pytest.raises(error) as traced:
        op(**{n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in given.items()})
    assert str(traced.value) == str(eager.value)


@pytest.mark.parametrize("name", ("linear_cross_entropy", "linear_log_prob"))
def test_dynamo_shows_the_message(name: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(getattr(liger_ops, name), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=f"{name}: lora_b must be given with lora_a, got None"):
        compiled(**HEAD, lora_a=A)


def test_a_target_out_of_range_is_an_error() -> None:
    x, weight = torch.zeros(2, 3), torch.zeros(4, 3)
    for wrong in (4, -1, 2**40):
        with pytest.raises(IndexError, match="target"):
            liger_ops.linear_cross_entropy(x, weight, torch.tensor([0, wrong]))


def test_a_gradient_that_there_is_not_is_refused() -> None:
    args, _ = leaves(HeadCase(class_weight=True, token_weight=True))
    for i, name in ((4, "class_weight"), (5, "token_weight")):
        given = list(args)
        given[i] = args[i].clone().requires_grad_()
        with pytest.raises(ValueError, match=f"linear_cross_entropy: {name} must not require"):
            call(given)
    x, weight, target = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="must be all False for the reduction 'none'"):
        liger_ops.linear_cross_entropy_forward(
            x, weight, target, reduction="none", gradient_mask=[True, False, False, False, False]
        )
    with pytest.raises(ValueError, match=r"gradient_mask\[2\] must be False without a bias"):
        liger_ops.linear_cross_entropy_forward(
            x, weight, target, gradient_mask=[False, False, True, False, False]
        )


def test_a_gradient_of_a_bias_that_there_is_not_is_refused() -> None:
    rows = torch.zeros(2)
    tensors = (rows, None, None, X, WEIGHT, TARGET, None, rows, rows, rows)
    options = (1.0, None, 1.0, -100, None, None, [True, True, True, False, False])
    with pytest.raises(ValueError, match=r"output_mask\[2\] must be False without a bias"):
        torch.ops.liger.linear_log_prob_backward(*tensors, *options)
