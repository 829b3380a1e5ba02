"""Rewrites of attention: which masks are causal or hide blocks, and which engine computes it."""
