"""Entries are tested themselves: a changed reference is noticed, and every option is drawn."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

import strategies
from liger_ops import library
from op_checks import as_tuple, assert_forward_matches_truth
from op_table import OPS
from op_under_test import FOLDERS, OpUnderTest, is_option, nothing

BOUNDED = [op for op in OPS.values() if op.output_magnitudes is not nothing]


@pytest.mark.parametrize("op", BOUNDED, ids=repr)
def test_a_changed_reference_is_noticed(op: OpUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    record, case = library.OPS[op.name], op.sample(torch.float32)
    definition = record.definition

    def changed(*args: Any) -> Any:
        outputs = tuple(
            y * 1.02 if y is not None and y.is_floating_point() else y
            for y in as_tuple(definition(*args))
        )
        return outputs if len(outputs) > 1 else outputs[0]

    monkeypatch.setattr(record, "definition", changed)
    with pytest.raises(AssertionError, match=op.id):
        assert_forward_matches_truth(op, FOLDERS[0], case)


@pytest.mark.parametrize("name", dict.fromkeys(op.name for op in BOUNDED))
def test_every_option_stride_dtype_and_gradient_is_drawn(name: str) -> None:
    """Over the forms of an op, each argument that is no tensor has several values, and so have the
    dtype, the layouts and the subset of gradients."""
    found: dict[str, set[str]] = defaultdict(set)
    forms = [op for op in BOUNDED if op.name == name]
    options = [a.name for a in forms[0].overload()._schema.arguments if is_option(a)]

    def note(case: Any) -> None:
        for form in forms:
            for option, value in zip(options, form.options(case), strict=True):
                found[option].add(repr(value))
        for field in ("dtype", "layout", "dy_layout", "output_mask"):
            found[field].add(repr(getattr(case, field)))

    strategies.for_cases(forms[0], note)
    assert not [field for field, values in found.items() if len(values) == 1]
