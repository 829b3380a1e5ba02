"""Choose the rewrites: by default those that make a training step faster or its memory smaller."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

from ..invariant_mode import is_invariant
from . import REWRITES

# The options of the backend `liger`. It hands other options to the inner backend.
OPTIONS = ("inner_backend", "mode", "padding", "rewrites", "strict")

# Rewrites that are off by default before Inductor, which computes their code as fast inside of a
# model: it fuses the sum of incoming gradients into a norm's backward, and an activation with the
# operations beside it. Training steps in bfloat16 on an H200
# (bench/steps/model.py):
# - Llama-3.2-1B, 8 x 2048 tokens: 233 ms with linear_cross_entropy and rope, 238 with norms and
#   activations too, 238 with none of them.
# - GPT-NeoX: 174 and 176 ms with layer_norm, 177 and 174 without.
# - UNet: 60 ms with group_norm, 63 without; channels last 65.5 and 65. Memory grows by a quarter,
#   because the norm's result is saved.
# The modulated norms and those of hyper-connections are not measured.
KEPT_BY_INDUCTOR = frozenset(
    {
        *("rms_norm", "fused_add_rms_norm", "layer_norm", "gated_rms_norm", "group_norm"),
        *("modulated_layer_norm", "modulated_rms_norm", "mhc_coeffs", "mhc_pre", "mhc_post_res"),
        *("swiglu", "geglu", "clamped_swiglu", "relu_squared"),
    }
)


# Rewrites to flex_attention, which Inductor compiles; another backend would compute dense scores.
# Within `liger_ops.invariant` they make varlen_attention alone.
NEEDS_INDUCTOR = frozenset({"masked_attention", "eager_attention"})


def chosen(names: Any, before_inductor: bool, argument: str) -> Collection[str]:
    """Return the rewrites in `names`, or the default ones of the inner backend if it is None.

    `argument` is the name of the option in error messages.

    Raises:
        TypeError: `names` is neither a string nor a list, tuple or set.
        ValueError: a rewrite does not exist, or runs only before Inductor.
    """
    has_attention = before_inductor or is_invariant()
    available = [name for name in REWRITES if has_attention or name not in NEEDS_INDUCTOR]
    if names is None:
        kept = KEPT_BY_INDUCTOR if before_inductor else ()
        return [name for name in available if name not in kept]
    if names == "all":
        return available
    if not isinstance(names, (str, list, tuple, set, frozenset)):
        raise TypeError(
            f"{argument} must be 'all', a name or a list of names, got {type(names).__name__}"
        )
    names = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in names if name not in REWRITES]
    if unknown:
        raise ValueError(f"{argument} has {unknown[0]!r}; there are 'all' and {list(REWRITES)}")
    if missing := [name for name in names if name not in available]:
        raise ValueError(f"{argument} has {missing[0]!r}, which only runs before Inductor")
    return names


def check_known(names: Collection[str], before_inductor: bool) -> None:
    """Raise ValueError for an option that neither this backend nor Inductor has."""
    inductors: Collection[str] = ()
    if before_inductor and names:
        from ..torch_private import inductor_config

        inductors = inductor_config.get_config_copy()
    for name in names:
        close = difflib.get_close_matches(name, OPTIONS, 1)
        # Another inner backend may have options of any name.
        is_known = name.replace("-", "_") in inductors if before_inductor else not close
        if not is_known:
            suggested = f" Did you mean {close[0]!r}?" if close else ""
            others = "Inductor's, which inductor.list_options() lists"
            if not before_inductor:
                others = "those of the inner backend"
            raise ValueError(
                f"backend liger: options has {name!r}.{suggested} Accepted are"
                f" {', '.join(map(repr, OPTIONS))}, and {others}"
            )


def checked_flag(flag: Any, argument: str) -> bool | None:
    """Return an option that is a bool or None; raise TypeError for anything else."""
    if flag is not None and not isinstance(flag, bool):
        raise TypeError(f"{argument} must be a bool or None, got {type(flag).__name__}")
    return flag
