"""Register the losses of hidden states and a head: PyTorch's matrix products, and between them the
row functions of a device's cross_entropy and divergence."""

from __future__ import annotations

from functools import partial

from .... import library
from ....ops.heads.head import scales
from . import (
    linear_cross_entropy,
    linear_divergence,
    linear_log_prob,
    linear_score_centering,
    linear_top_k,
    linear_top_k_divergence,
)
from .chunked_head import Device


def register(name: str, device: Device) -> None:
    """Register the ops on the device of this name."""
    scales[name] = device.scale
    for host in (
        linear_cross_entropy, linear_divergence, linear_log_prob, linear_score_centering,
        linear_top_k, linear_top_k_divergence,
    ):  # fmt: skip
        rows = device.divergence if host is linear_divergence else device.cross_entropy
        op = host.__name__.rpartition(".")[2]
        # The functions allocate their outputs, so that the output of a gradient is not in memory
        # beside its wider sum.
        options = {"device": name, "allocates": True, "module": rows.__name__}
        library.kernel(f"{op}_forward", **options)(partial(host.forward, device))
        library.kernel(f"{op}_backward", **options)(partial(host.backward, device))
