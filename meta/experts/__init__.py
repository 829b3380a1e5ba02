"""Checks of moe_experts."""
