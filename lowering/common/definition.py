"""Ops that run their definition on a device: PyTorch's functions are what they have there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import library


def run_definition(name: str) -> Callable[[Any], Any]:
    def run(call: Any) -> Any:
        library.allocate(name, call)
        return library.OPS[name].definition(*call)

    return run
