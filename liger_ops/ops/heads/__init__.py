"""Losses of hidden states and a head, which compute the logits in chunks and do not keep them."""
