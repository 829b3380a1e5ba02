"""Rules of DTensor for every op: what may be sharded, and what is communicated."""
