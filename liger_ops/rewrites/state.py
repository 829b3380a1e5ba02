"""Keep the state that a run of a model changes: its buffers, and the random number generators."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def state_kept(model: Any) -> Iterator[None]:
    """Restore, at the end of the context, a module's buffers and the random state.

    The random state is that of Python, NumPy, the CPU and the current device.
    """
    buffers = list(model.buffers()) if isinstance(model, torch.nn.Module) else []
    before = [buffer.detach().clone() for buffer in buffers]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
    device_type = "cuda" if accelerator is None else accelerator.type
    with _python_random_kept(), torch.random.fork_rng(devices, device_type=device_type):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)


@contextlib.contextmanager
def _python_random_kept() -> Iterator[None]:
    # NumPy too: models of speech draw the spans that SpecAugment masks with it.
    numpy: Any = sys.modules.get("numpy")
    python, arrays = random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        if arrays is not None:
            numpy.random.set_state(arrays)


def random_state() -> list[Tensor]:
    """Return the states of the random number generators of the CPU and the current device."""
    states = [torch.get_rng_state()]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        states.append(torch.get_device_module(accelerator).get_rng_state())
    return states
