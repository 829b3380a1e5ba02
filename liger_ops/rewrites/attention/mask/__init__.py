"""A proof that an attention mask is causal, from the operations that compute it.

`evaluate` reads a mask as a function of its indices, by the `rules` of PyTorch's operations, in the
`algebra` of integers that are affine in the indices; `proof` compares that function with the causal
mask. Sizes may be symbolic, so a proof holds for every size that the graph is compiled for.
Importing the modules of rules registers them.
"""

from . import comparisons, rules

__all__ = ["comparisons", "rules"]
