"""Attention masks as functions of their indices, and proofs about these functions.

`evaluate` reads a mask as a function of its indices, by the `rules` of PyTorch's operations;
`proof` compares that function with the causal mask. `predicate` and `blocks` turn the function into
a block mask of flex_attention. Sizes may be symbolic, so a proof holds for every size that the
graph is compiled for. Importing the modules of rules registers them.
docs/internals/masks.md has an example.
"""

from . import rules

__all__ = ["comparisons", "rules"]
