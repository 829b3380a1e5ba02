"""Losses over a vocabulary that is sharded over the ranks of a process group.

They compute with plain tensors. The op of DTensors that `DTensor.from_local` makes of them has the
same loss and gradients, but it does not serve in their place:

* A forward and backward of `linear_cross_entropy` take 8.2 ms of host time, and 3.6 ms by the
  function here (two gloo ranks, 8 tokens, 128 words). A quarter of the 8.2 are 18 calls of
  `from_local`, and another quarter the placements and the check of the whole call, which forward
  and backward derive each time.
* The gradient of a replicated x stays a sum over the ranks until it is used; here the forward
  all-reduces it, a chunk of tokens at a time, beside matrix products.
* The gradient of weight is not handed over to the backward, which takes its memory a second time.
* A head that is smaller than the rows of x is gathered: every rank then has all words, a target
  that is out of range raises on a CPU, and the ranks have other numbers of collectives.
* `create_graph=True` is not refused: only a second differentiation raises, an error of DTensor.
* In a graph with dynamic shapes, Dynamo of torch 2.13 does not trace `from_local(shape=...)`,
  without which the ranks' words must have equal numbers.
"""
