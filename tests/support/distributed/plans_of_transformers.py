"""Models that transformers shards as it loads them, by their plans."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

import ranks
from fused_families import VOCABULARY
from reloaded_models import reloaded


def loaded(model: Any, experts: str | None = None, **config: Any) -> Any:
    """Load the weights of a model of one process into a model sharded by DistributedConfig.

    The first model's vocabulary gets another word, so that it divides by the ranks: before 5.23,
    transformers shards no other.
    """
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    # transformers takes the GPU of the number LOCAL_RANK.
    gpu = rank if ranks.DEVICE == "cpu" else str(torch.cuda.current_device())
    os.environ.update(RANK=rank, LOCAL_RANK=gpu, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    options: dict[str, Any] = {} if experts is None else {"experts_implementation": experts}
    model.resize_token_embeddings(VOCABULARY + 1, mean_resizing=False)
    options["distributed_config"] = DistributedConfig(**config)
    return reloaded(model, attn_implementation="sdpa", **options)
