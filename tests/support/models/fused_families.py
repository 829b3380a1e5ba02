"""Small models with random weights, one per family that `fuse` has to handle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 61
TOKENS = (2, 7)

TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip

# Every token goes to every expert: a choice of experts could flip with the last bit of a router's
# logit, and two runs with different rounding could not be compared.
EXPERTS = {"num_experts_per_tok": 4, "experts_implementation": "batched_mm"}


@dataclass(frozen=True)
class Family:
    """A model, an input, and how often `fuse` finds each op in it. Each of these runs once in a
    forward."""

    name: str
    build: Callable[[], nn.Module]
    ops: dict[str, int]
    inputs: Callable[[torch.dtype], Tensor]
    has_loss: bool = False

    @property
    def parts(self) -> dict[str, int]:
        """The parts that `fuse` finds: the ops, and losses, which need labels to run."""
        losses = {"linear_cross_entropy": self.has_loss, "router_losses": "moe_experts" in self.ops}
        return {**self.ops, **dict.fromkeys((op for op, has_it in losses.items() if has_it), 1)}

    @property
    def forwards(self) -> dict[str, int]:
        """The ops that a forward runs, by the name that reaches the dispatcher."""
        names = {"moe_experts": "moe_experts_forward"}
        return {names.get(op, op): count for op, count in self.ops.items()}

    def model(self) -> nn.Module:
        """Build the model in float32, in training mode.

        Vectors are changed from their initial values: a new norm's weight is all ones or zeros,
        which hides a wrong offset.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build().float().train()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 1:
                        parameter.add_(0.3 * torch.randn_like(parameter))
        return model


def output(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return y if isinstance(y, Tensor) else y.logits


def token_inputs(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, VOCABULARY, TOKENS, generator=generator)


def image_inputs(dtype: torch.dtype) -> Tensor:
    """Draw random numbers that every dtype represents exactly."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, 8, 8, generator=generator).bfloat16().to(dtype)


def text(name: str, rms_norms: int, activation: str = "swiglu", **options: Any) -> Family:
    """Return a causal language model of transformers: `<name>Config` and `<name>ForCausalLM`."""
    config_name = options.pop("config", f"{name}Config")
    config = {**TEXT, **options}
    experts = config.pop("experts_implementation", None)
    arguments = {} if experts is None else {"experts_implementation": experts}

    def build() -> nn.Module:
        model_class = getattr(transformers, f"{name}ForCausalLM")
        return model_class._from_config(
            getattr(transformers, config_name)(**config), attn_implementation="eager", **arguments
        )

    layers = config["num_hidden_layers"]
    return Family(
        name, build, {"rms_norm": rms_norms, activation: layers, "rope": layers}, token_inputs,
        has_loss=True,
    )  # fmt: skip


def bert() -> nn.Module:
    options = {name: TEXT[name] for name in TEXT if name not in ("num_key_value_heads", "head_dim")}
    config = transformers.BertConfig(
        **options, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.BertForMaskedLM._from_config(config, attn_implementation="eager")


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        image_size=8, patch_size=4, num_labels=5,
    )  # fmt: skip
    return transformers.ViTForImageClassification._from_config(config, attn_implementation="eager")


class ResidualBlock(nn.Module):
    """A residual block as in the UNet of a diffusion model."""

    def __init__(self, channels: int, out_channels: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels, eps=1e-6)
        self.conv1 = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, out_channels, eps=1e-6)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.activation = nn.SiLU()
        self.shortcut = nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(self.activation(self.norm1(x)))
        h = self.conv2(self.activation(self.norm2(h)))
        return self.shortcut(x) + h


def diffusion() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), ResidualBlock(16, 32, 4), ResidualBlock(32, 16, 4)
    )


FAMILIES = [
    text("Llama", 5),
    text("Mistral", 5),
    text("Qwen3", 9),
    text("Gemma", 5, "geglu"),
    text(
        "Gemma3", 13, "geglu", config="Gemma3TextConfig",
        layer_types=["sliding_attention", "full_attention"],
    ),
    text("Olmo2", 9),
    text("Phi3", 5),
    text("Glm4", 9),
    text("GptOss", 5, "moe_experts", num_local_experts=4, **EXPERTS),
    text("Qwen3Moe", 9, "moe_experts", num_experts=4, moe_intermediate_size=16, **EXPERTS),
    Family("Bert", bert, {"layer_norm": 6}, token_inputs, has_loss=True),
    Family("ViT", vit, {"layer_norm": 5}, image_inputs),
    Family("diffusion", diffusion, {"group_norm": 4}, image_inputs),
]  # fmt: skip
