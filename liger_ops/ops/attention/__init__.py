"""Attention over a neighborhood, over tokens' neighbours, and over residuals."""
