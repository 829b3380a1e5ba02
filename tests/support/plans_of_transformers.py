"""Models that transformers shards as it loads them, by their plans."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

import ranks
from fused_families import VOCABULARY


def loaded(one: Any, experts: str | None = None, **config: Any) -> Any:
    """The weights of a model of one process, in a model that is sharded by DistributedConfig.

    The one's vocabulary gets another word: before 5.23, transformers shards words that divide.
    """
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    # transformers takes the GPU of this number.
    gpu = rank if ranks.DEVICE == "cpu" else str(torch.cuda.current_device())
    os.environ.update(RANK=rank, LOCAL_RANK=gpu, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    options = {} if experts is None else {"experts_implementation": experts}
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        one.resize_token_embeddings(VOCABULARY + 1, mean_resizing=False)
        # The first rank saves.
        one.save_pretrained(folders[0])
        dist.barrier()
        model = type(one).from_pretrained(
            folders[0], attn_implementation="sdpa",
            distributed_config=DistributedConfig(**config), **options,
        )  # fmt: skip
        dist.barrier()
    return model.train()
