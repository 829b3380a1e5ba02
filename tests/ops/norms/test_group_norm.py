"""group_norm of images whose channels are last."""

from __future__ import annotations

import torch

import liger_ops


def test_channels_last() -> None:
    x = torch.randn(2, 6, 5, 7).to(memory_format=torch.channels_last)
    y = liger_ops.group_norm(x, 3)
    assert y.is_contiguous()
    torch.testing.assert_close(y, torch.nn.functional.group_norm(x, 3))
