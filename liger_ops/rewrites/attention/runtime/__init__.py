"""Masks that only a call shows: padding, and masks that another graph computed."""
