"""What is known of a language model whose loss is fused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossFacts:
    """How a model's forward is called for a loss.

    head: the path to its head.
    own_arguments: the options that its loss_function has arguments for, which are the model's.
    takes_shift_labels: whether shift_labels are the labels of its loss.
    output_class: the class of its output.
    makes_loss: whether it makes a torch.nn.CrossEntropyLoss in the forward, which Dynamo calls in a
        way of its own, that takes only tensors.
    rebinds: whether that is the name CrossEntropyLoss among the globals of its forward.
    """

    head: str
    own_arguments: tuple[str, ...] = ()
    takes_shift_labels: bool = False
    output_class: type | None = None
    makes_loss: bool = False
    rebinds: bool = False
