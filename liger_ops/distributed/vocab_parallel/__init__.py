"""Losses whose words are sharded over ranks."""
