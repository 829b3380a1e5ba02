"""The sizes of commonly trained models, from their published configurations."""

from __future__ import annotations

from dataclasses import dataclass

# Tokens on a device at once; fewer if every token has a row as long as the vocabulary.
TOKENS = 8192
TOKENS_OF_VOCABULARY = 4096


@dataclass(frozen=True)
class Model:
    hidden: int
    intermediate: int
    # The number of heads of q and of k, and the elements of a head that rope rotates.
    heads: tuple[int, int, int]
    vocabulary: int
    activation: str = "swiglu"


MODELS = {
    "llama-3.2-1b": Model(2048, 8192, (32, 8, 64), 128256),
    "llama-3.1-8b": Model(4096, 14336, (32, 8, 128), 128256),
    "llama-3.1-70b": Model(8192, 28672, (64, 8, 128), 128256),
    "qwen3-0.6b": Model(1024, 3072, (16, 8, 128), 151936),
    "qwen3-8b": Model(4096, 12288, (32, 8, 128), 151936),
    "qwen3-32b": Model(5120, 25600, (64, 8, 128), 151936),
    "gemma3-4b": Model(2560, 10240, (8, 4, 256), 262208, "geglu"),
    "gemma3-27b": Model(5376, 21504, (32, 16, 128), 262208, "geglu"),
    "deepseek-v3": Model(7168, 18432, (128, 1, 64), 129280),
    "gpt-oss-20b": Model(2880, 2880, (64, 8, 64), 201088, "clamped_swiglu"),
    "nemotron-4-15b": Model(6144, 24576, (48, 8, 128), 256000, "relu_squared"),
}


HIDDEN = {name: (TOKENS, model.hidden) for name, model in MODELS.items()}
VOCABULARY = {name: (TOKENS_OF_VOCABULARY, model.vocabulary) for name, model in MODELS.items()}
HEAD = {
    name: (TOKENS_OF_VOCABULARY, model.hidden, model.vocabulary) for name, model in MODELS.items()
}
ROPE = {name: (2, TOKENS // 2, *model.heads) for name, model in MODELS.items()}


def intermediate(activation: str) -> dict[str, tuple[int, int]]:
    """Return the shapes of the models with this activation."""
    return {
        name: (TOKENS, model.intermediate)
        for name, model in MODELS.items()
        if model.activation == activation
    }
