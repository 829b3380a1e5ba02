"""Losses over a vocabulary that is sharded over the ranks of a process group."""
