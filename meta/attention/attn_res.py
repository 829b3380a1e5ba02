"""attn_res: the number of blocks is not 0."""

from __future__ import annotations

from typing import Any

from ..checks import op
from ..lines import also


@also("attn_res")
def blocks(call: Any) -> None:
    if call.x.shape[0] == 0:
        raise ValueError(
            f"{op(call)}: x must have at least one block, got shape {tuple(call.x.shape)}"
        )
