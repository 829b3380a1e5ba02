"""Losses of a process group's ranks, each of which has some words of the vocabulary."""
