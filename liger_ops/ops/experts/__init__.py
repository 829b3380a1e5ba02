"""Experts: the routed MLPs of mixture-of-experts layers."""
