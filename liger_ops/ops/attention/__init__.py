"""Attention in windows, mixed over neighbouring tokens and heads, and over a model's depth."""
