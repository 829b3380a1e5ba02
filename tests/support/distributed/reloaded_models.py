"""Models that transformers loads on several ranks."""

from __future__ import annotations

import tempfile
from typing import Any

import torch.distributed as dist


def reloaded(model: Any, **options: Any) -> Any:
    """Load the weights of the first rank's model by `from_pretrained` with these options."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        # The first rank saves.
        model.save_pretrained(folders[0])
        dist.barrier()
        loaded = type(model).from_pretrained(folders[0], **options)
        dist.barrier()
    return loaded.train()
