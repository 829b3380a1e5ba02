"""A test whose tool is missing is skipped, or fails if LIGER_OPS_NPU_REQUIRE_ALL=1."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def needs() -> Callable[[str], None]:
    """Return a function that stops the test if it is given a reason, such as a missing tool."""

    def stop(reason: str) -> None:
        if reason and os.environ.get("LIGER_OPS_NPU_REQUIRE_ALL"):
            pytest.fail(reason)
        if reason:
            pytest.skip(reason)

    return stop
