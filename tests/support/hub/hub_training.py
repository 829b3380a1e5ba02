"""Train a model with layers of a kernels hub's repository, beside the model as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compiled_models import loss_of, results
from liger_ops.hub import local
from training_steps import NEAR, Model, difference, one_line, randomized, step

EQUAL, WRONG, FAILS = "equal", "**wrong**", "**fails**"
SAME_ERROR = "not without layers"


def outcome(
    model: Model,
    own: dict[str, Tensor],
    kernelize: Callable[[nn.Module], None],
    backend: str,
    compiler: Callable[..., Any] | None = None,
) -> str:
    """Train a step and return how its loss and gradients compare with the model's own.

    Args:
        model: what is trained.
        own: the results of the model as it is.
        kernelize: gives it the layers.
        backend: of `torch.compile`, by which the model as it is is tried where the step raises.
        compiler: the same backend as a function, or None for an eager step.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = randomized(model.build())
    try:
        kernelize(made)
        loss = loss_of(made)
        if compiler is not None:
            loss = torch.compile(loss, fullgraph=True, backend=compiler)
        apart = difference(results(made, loss, model.batch()), own)
        return EQUAL if apart <= NEAR else f"{WRONG}: {apart:.1e}"
    except Exception as error:
        alone = compiler is not None and fails_alone(model, backend)
        return f"{SAME_ERROR if alone else FAILS}: {one_line(error)}"
    finally:
        local.restore(made)


@functools.cache
def fails_alone(model: Model, backend: str) -> bool:
    """Return whether the model as it is cannot be compiled in one graph."""
    try:
        step(model, "plain", fullgraph=True, backend=backend)
    except Exception:
        return True
    return False
