"""Every op under test, by its name and form."""

from __future__ import annotations

import activations
import heads
import losses
import norms
import ropes
import softmaxes
from op_under_test import OpUnderTest

OPS: dict[str, OpUnderTest] = {
    op.id: op
    for op in (
        *norms.OPS,
        *activations.OPS,
        *softmaxes.OPS,
        *ropes.OPS,
        *losses.OPS,
        *heads.OPS,
    )
}
