"""A plugin for Axolotl that fuses the model which Axolotl loads.

In the configuration:

    plugins:
      - liger_ops.integrations.axolotl.LigerOpsPlugin
"""

from __future__ import annotations

import logging
from typing import Any

import liger_ops

try:
    from axolotl.integrations.base import BasePlugin
except ImportError as error:
    raise ImportError(
        f"liger_ops.integrations.axolotl needs axolotl.integrations.base of Axolotl: {error}"
    ) from error

__all__ = ["LigerOpsPlugin"]

logger = logging.getLogger(__name__)


class LigerOpsPlugin(BasePlugin):
    """Call `liger_ops.fuse` on the model, after its adapters are applied.

    With LoRA layers and no quantisation, `lora=True` fuses these too. What is fused and what is
    left is logged. Use the plugin without `axolotl.integrations.liger.LigerPlugin`, whose patches
    `fuse` would not recognise.
    """

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Fuse the model, which Axolotl has loaded with its adapters."""
        logger.info("%s", liger_ops.fuse(model, lora=getattr(cfg, "adapter", None) == "lora"))
