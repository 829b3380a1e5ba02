"""Losses of post-training, from the log-probabilities of tokens, in plain PyTorch.

`torch.compile` compiles them with the model, without a graph break and without waiting for the
device. They do not communicate with other processes.
"""

from .dpo import dpo_loss
from .grpo import PolicyOutput, grpo_loss
from .kto import kto_kl, kto_loss
from .modules import (
    LinearCPOLoss,
    LinearDPOLoss,
    LinearGRPOLoss,
    LinearKTOLoss,
    LinearORPOLoss,
    LinearScoreCenteringLoss,
    LinearSimPOLoss,
)
from .outputs import PreferenceOutput, UnpairedPreferenceOutput
from .policy_terms import entropy_threshold, off_policy_mask
from .reference_free import cpo_loss, orpo_loss, simpo_loss
from .score_centering import CenteredOutput, score_centering_loss
from .sequences import sequence_log_prob

__all__ = [
    "CenteredOutput", "LinearCPOLoss", "LinearDPOLoss", "LinearGRPOLoss", "LinearKTOLoss",
    "LinearORPOLoss", "LinearScoreCenteringLoss", "LinearSimPOLoss", "PolicyOutput",
    "PreferenceOutput", "UnpairedPreferenceOutput", "cpo_loss", "dpo_loss", "entropy_threshold",
    "grpo_loss", "kto_kl", "kto_loss", "off_policy_mask", "orpo_loss", "score_centering_loss",
    "sequence_log_prob", "simpo_loss",
]  # fmt: skip
