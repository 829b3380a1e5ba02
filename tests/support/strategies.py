"""Hypothesis strategies: they draw shapes, strides and options; the values come from a seed."""

from __future__ import annotations

from attention_strategies import multi_token_attentions, neighborhoods, rms_norm_ropes, ropes
from layer_strategies import activations, attention_residuals, embeddings, softmaxes
from loss_strategies import distribution_losses, divergences, log_probs, losses
from norm_strategies import (
    dyts,
    fused_add_rms_norms,
    gated_rms_norms,
    group_norms,
    layer_norms,
    modulated_norms,
    poly_norms,
    rms_norms,
    row_norms,
)
from strategy_parts import DTYPES, ROWS, SIZES, TILES, has_rows, leading_shapes

__all__ = [
    "DTYPES",
    "ROWS",
    "SIZES",
    "TILES",
    "activations",
    "attention_residuals",
    "distribution_losses",
    "divergences",
    "dyts",
    "embeddings",
    "fused_add_rms_norms",
    "gated_rms_norms",
    "group_norms",
    "has_rows",
    "layer_norms",
    "leading_shapes",
    "log_probs",
    "losses",
    "modulated_norms",
    "multi_token_attentions",
    "neighborhoods",
    "poly_norms",
    "rms_norm_ropes",
    "rms_norms",
    "ropes",
    "row_norms",
    "softmaxes",
]
