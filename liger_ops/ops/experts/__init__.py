"""The routed MLPs of mixture-of-experts layers."""
