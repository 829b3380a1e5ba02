"""The table of ops under test, by name and form."""

from __future__ import annotations

import activation_cases
import cross_entropy_cases
import distribution_cases
import divergence_cases
import dyt_cases
import expert_cases
import gated_norm_cases
import layer_cases
import linear_cross_entropy_cases
import linear_divergence_cases
import linear_log_prob_cases
import linear_score_centering_cases
import linear_top_k_cases
import linear_top_k_divergence_cases
import log_prob_cases
import lora_cases
import mhc_cases
import modulated_norm_cases
import multi_token_cases
import neighborhood_cases
import norm_cases
import rope_cases
import router_cases
import softmax_cases
import varlen_cases
from op_under_test import OpUnderTest

OPS: dict[str, OpUnderTest] = {
    op.id: op
    for op in (
        *norm_cases.OPS, *gated_norm_cases.OPS, *modulated_norm_cases.OPS, *dyt_cases.OPS,
        *activation_cases.OPS, *softmax_cases.OPS, *rope_cases.OPS, *layer_cases.OPS,
        *lora_cases.OPS, *neighborhood_cases.OPS, *expert_cases.OPS, *multi_token_cases.OPS,
        *cross_entropy_cases.OPS, *linear_cross_entropy_cases.OPS, *log_prob_cases.OPS,
        *divergence_cases.OPS, *distribution_cases.OPS, *router_cases.OPS,
        *linear_log_prob_cases.OPS, *linear_divergence_cases.OPS,
        *linear_score_centering_cases.OPS,
        *linear_top_k_cases.OPS, *linear_top_k_divergence_cases.OPS,
        *mhc_cases.OPS, *varlen_cases.OPS,
    )
}  # fmt: skip
