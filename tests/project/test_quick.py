"""The quick tier covers every op on every device's path, every rewrite, `fuse`, and the layout."""

from __future__ import annotations

import pytest

from fused_families import FAMILIES
from liger_ops import library
from liger_ops.rewrites import REWRITES
from op_parts import base
from quick import TESTS, TIER

PATHS = ("definition", "cuda", "npu", "simulated npu")


@pytest.mark.quick
def test_the_tier_covers_each_part(pytestconfig: pytest.Config) -> None:
    tier = pytestconfig.stash[TIER]
    if not tier.is_whole:
        pytest.skip("the tier is known where the whole suite is collected")
    # Other tests define ops.
    ops = {
        base(name)
        for name, op in library.OPS.items()
        if op.definition.__module__.startswith("liger_ops.")
    }
    assert tier.ops >= {(op, path) for op in ops for path in PATHS}
    assert tier.rewrites == REWRITES.keys()
    assert tier.families >= {family.name for family in FAMILIES} and len(FAMILIES) >= 10
    assert TESTS / "project" / "test_layout.py" in tier.quick_files
