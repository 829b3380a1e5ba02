"""The values of options that an op declares, and what it says of others."""

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
