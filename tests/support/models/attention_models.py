"""Small models of each kind of attention, the batches that collators give them, and their steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import flex_attention

from liger_ops.fusion import fuse
from liger_ops.fusion.attention import attention_function

# The sequence length: two blocks of a block mask, the last of them not full.
LENGTH = 150
WINDOW = 40
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": WINDOW, "layer_types": LAYERS}),
    "gpt_oss": ("GptOssConfig", {"sliding_window": WINDOW, **EXPERTS}),
    "llama4": (
        "Llama4TextConfig",
        {
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
        },
    ),
    # Heads of 48 for queries and keys, and of 32 for values.
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
            "v_head_dim": 32, "num_key_value_heads": 4, "first_k_dense_replace": 2,
        },
    ),
}  # fmt: skip
# The models above are compared in float64; the attention of those below is not exact in it.
NAMES = tuple(CONFIGS)
# Whether Gemma 2's default attention is its own code. In an older transformers it is SDPA, which
# ignores the cap.
OWN_CAPS = not transformers.Gemma2PreTrainedModel._supports_sdpa
CONFIGS["gemma2"] = (
    "Gemma2Config",
    {
        "sliding_window": WINDOW,
        "layer_types": LAYERS,
        # So small that the scores come near to it.
        "attn_logit_softcapping": 2.0,
        "attn_implementation": "eager",
    },
)
CONFIGS["llama-eager"] = ("LlamaConfig", {"attn_implementation": "eager"})


def model(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    """Make a model in training mode, with its default implementation of attention."""
    config_name, fields = CONFIGS[name]
    config = getattr(transformers, config_name)(**{**SIZES, **fields, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for key, parameter in made.named_parameters():
                if key.endswith("sinks"):
                    parameter.normal_()
    return made.to(dtype).train()


def fuse_attention(made: nn.Module) -> Any:
    """Fuse the attention of a model, and nothing else."""
    return fuse(made, norms=False, activations=False, rope=False, loss=False)


def batch(kind: str, length: int = LENGTH, device: str = "cpu") -> dict[str, Tensor]:
    """Draw two rows: "bare", with a mask of "ones", with padding "left" or "right", or "packed"."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, SIZES["vocab_size"], (2, length), generator=generator, device="cpu")
    ids = ids.to(device)
    inputs = {"input_ids": ids, "labels": ids}
    cut = length // 3
    mask = torch.ones_like(ids)
    if kind == "right":
        mask[1, -cut:] = 0
    elif kind == "left":
        mask[1, :cut] = 0
    elif kind == "packed":
        # A document of one token is in the middle.
        documents = torch.cat((torch.arange(cut), torch.arange(1), torch.arange(length - cut - 1)))
        inputs["position_ids"] = documents.expand(2, -1)
    if kind in ("right", "left", "ones"):
        inputs["attention_mask"] = mask
    return {name: x.to(device) for name, x in inputs.items()}


def step(made: nn.Module, inputs: dict[str, Tensor], call: Any = None) -> dict[str, Tensor]:
    """Return the loss, the logits of all tokens, padding too, and every parameter's gradient."""
    made.zero_grad()
    y = (made if call is None else call)(**inputs, use_cache=False)
    y.loss.backward()
    grads = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
    return {"loss": y.loss.detach(), "logits": y.logits.detach(), **grads}


@contextmanager
def blocks_everywhere() -> Iterator[None]:
    """Use block masks and flex_attention on the CPU, where it has a gradient unless compiled."""
    with (
        mock.patch.object(attention_function, "EVERYWHERE", True),
        mock.patch.object(flex_attention, "_validate_device", lambda *_: None),
    ):
        yield
