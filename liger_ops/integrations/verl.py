"""The op behind verl's class for log-probabilities of tokens.

With `use_fused_kernels=True` and the backend `torch` or `liger`, verl's actors compute them from
hidden states by `verl.utils.experimental.torch_functional.FusedLinearForPPO`.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from .. import linear_log_prob
from .replaced import Replaced

# The forwards of verl's models look the class up in this module, in every call.
MODULE, NAME = "verl.utils.experimental.torch_functional", "FusedLinearForPPO"
_replaced = Replaced()


def install() -> None:
    """Replace verl's `FusedLinearForPPO` by `linear_log_prob`, in this process.

    Call it in the processes of verl's workers: a model whose forward verl has patched for the
    backend `torch` or `liger` of `use_fused_kernels` uses the op from its next call on. The
    log-probabilities and entropies are verl's up to rounding. Both are float32, and their logits
    are divided by the temperature in float32; verl rounds the quotient and the entropy, and some
    versions the log-probability, to the dtype of the logits. torch.compile sees one operator.

    `uninstall` undoes it. A second call does nothing more. Code that imported the class by name
    before the call keeps verl's class.

    Raises:
        ImportError: verl is not installed, or cannot be imported.
        RuntimeError: this version of verl does not have the class; nothing is changed.

    Example:
        >>> from liger_ops.integrations import verl
        >>> verl.install()  # doctest: +SKIP
    """
    if _replaced:
        return
    importlib.import_module("verl")
    try:
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if not f"{MODULE}.".startswith(f"{error.name}."):
            raise
        module = None
    if not hasattr(module, NAME):
        raise RuntimeError(
            f"liger_ops.integrations.verl.install: {MODULE} must have {NAME}; this version of verl"
            " does not"
        )
    assert module is not None
    _replaced.set(module, NAME, FusedLinearForPPO)


def uninstall() -> None:
    """Restore verl's own class. Does nothing if `install` was not called."""
    _replaced.undo()


class FusedLinearForPPO(torch.nn.Module):
    """Replacement of verl's class of this name, with the same arguments.

    chunk_size is not used, because `linear_log_prob` sizes its chunks by bytes, nor is
    impl_backend, "torch" or "liger", by which verl chooses between its own code and Liger-Kernel.
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        if impl_backend not in ("torch", "liger"):
            raise ValueError(
                f"FusedLinearForPPO: impl_backend must be 'torch' or 'liger', got {impl_backend!r}"
            )
        self.chunk_size, self.impl_backend = chunk_size, impl_backend

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the log-probability of each of input_ids, and the entropy.

        Args:
            hidden_states: (T, D) or (B, T, D).
            vocab_weights: (V, D).
            input_ids: (T,) or (B, T), the targets, of any integer dtype.
            temperature: above 0.

        Returns:
            log_probs, entropy: of the shape of input_ids, float32.
        """
        return linear_log_prob(hidden_states, vocab_weights, input_ids.long(), None, temperature)
