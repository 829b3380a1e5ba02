"""Attributes that modules and configurations of transformers and peft have in some versions only.

`read` returns such an attribute. For a version without it, there is one default, which is what the
code of that version does.
"""

from __future__ import annotations

from typing import Any

# Attribute -> its value in a version that does not have it.
DEFAULTS: dict[str, Any] = {
    # transformers: experts, by `use_experts_implementation`, and their configuration.
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "has_post_expert_norm": False,
    "config": None,
    "_experts_implementation": None,
    # transformers: classes of models, and their configurations.
    "_supports_flex_attn": False,
    "attention_chunk_size": None,
    "output_attentions": False,
    # peft: layers with a LoRA, and wrappers of parameters with one.
    "cast_input_dtype_enabled": True,
    "num_experts": 1,
    "_did_swap_in_out_features": False,
}


def read(owner: Any, name: str) -> Any:
    """Return an attribute of an object, or its default from DEFAULTS."""
    return getattr(owner, name, DEFAULTS[name])
