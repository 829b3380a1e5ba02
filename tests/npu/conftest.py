"""What a missing tool means: a test skipped, or with LIGER_OPS_NPU_REQUIRE_ALL=1 a failure."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def needs() -> Callable[[str], None]:
    """Given why a tool is missing, or nothing, stop the test that needs it."""

    def stop(reason: str) -> None:
        if reason and os.environ.get("LIGER_OPS_NPU_REQUIRE_ALL"):
            pytest.fail(reason)
        if reason:
            pytest.skip(reason)

    return stop
