"""`moe_experts` as an experts implementation of transformers, by the name "liger".

    from liger_ops.integrations import transformers as liger_transformers

    liger_transformers.install()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="liger")

`fuse` needs no name: it finds the experts of a model by what they compute.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..fusion.layers.experts.experts import NAME, REGISTRY, registered

__all__ = ["install", "uninstall"]


def install() -> None:
    """Register "liger" with transformers' `ALL_EXPERTS_FUNCTIONS`, for this process.

    A model uses it if it is loaded with `experts_implementation="liger"`, or after
    `model.set_experts_implementation("liger")`. `moe_experts` then computes its experts, whatever
    the layout of their weights, also with biases and with the sentinels of expert parallelism.
    Under autocast the op's inputs are cast as those of a linear layer are.

    The activation is recognised from the code of the module's `_apply_gate`, once per module.
    Experts with an activation that the op lacks, or with a norm after them, raise ValueError with
    the reason when they are called.

    `uninstall` undoes it. A second call does nothing more.

    Raises:
        ImportError: transformers is not installed, or has no `ALL_EXPERTS_FUNCTIONS`.

    Example:
        >>> from liger_ops.integrations import transformers
        >>> transformers.install()  # doctest: +SKIP
    """
    _functions().register(NAME, registered)


def uninstall() -> None:
    """Remove "liger" from transformers' registry."""
    functions = _functions()
    if NAME in functions:
        del type(functions)._global_mapping[NAME]


def _functions() -> Any:
    try:
        return importlib.import_module(REGISTRY).ALL_EXPERTS_FUNCTIONS
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "liger_ops.integrations.transformers.install: transformers must have"
            f" {REGISTRY}.ALL_EXPERTS_FUNCTIONS, which 5.0 and later have: {error}"
        ) from error
