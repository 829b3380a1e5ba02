"""Find the position for the op that replaces a loss, and insert the op.

An op that returns terms of a loss per token comes with nodes that replace the code's terms. Sizes
that the code reads from logits are read from the head's input: logits that only a `size` uses would
still be computed.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..engine.canonical import same, value
from ..engine.graph_state import GraphState, erase_unused
from ..engine.insertion import ORIGIN, Refused, derive
from ..engine.rewrite import emit, replace
from .loss_chain import NARROW, LogitsPath, as_rows, check_tensor_types, select_positions
from .loss_head import LinearHead, check_logits_users, head_of, total_bias
from .losses import NO_CLASS, JoinedTargets, Loss, TokenTerm, check_computed_here, target_nodes

# Positions among the results of the ops that end in _forward.
_LOSS, _LSE, _TARGET_LOGIT, _LSE_ERROR = 0, 2, 3, 7
_LOG_PROB, _ENTROPY = 0, 1


def insert_terms(
    op: str, loss: Loss, x: fx.Node, before: tuple[Any, ...], after: tuple[Any, ...],
    at: fx.Node, state: GraphState,
) -> tuple[fx.Node, list[fx.Node]]:  # fmt: skip
    """Insert the op before `at`; return it, and for each term of the loss the node to replace it.

    `x`, `before` and `after` are the op's arguments before and after the target.
    """
    kinds = {term.kind for term in loss.terms}
    # The ops that end in _forward have no autocast rule, so their inputs are cast here.
    dtype = value(loss.path.logits).dtype
    x = _cast(x, dtype, at)
    before = tuple(_cast(tensor, dtype, at) for tensor in before)
    after = tuple(_cast(tensor, dtype, at) for tensor in after)
    target, ignored = _target(loss, x, at)
    if op.endswith("log_prob"):
        path = loss.path
        options = (path.temperature, path.softcap, path.scale, NO_CLASS)
    else:
        options = _cross_entropy_options(loss, kinds)
    with state.modes_of(at):
        overload = getattr(torch.ops.liger, f"{op}_forward").default
        new = emit(at, overload, (x, *before, target, *after, *options))
    if op.endswith("log_prob"):
        nodes = _log_prob_parts(kinds, new, ignored, at)
    else:
        nodes = _cross_entropy_parts(kinds, new, value(loss.path.logits).shape[-1], at)
    mode = state.modes(at)
    return new, [_as_term(term, *nodes[term.kind], mode, at, state) for term in loss.terms]


def _target(loss: Loss, x: fx.Node, at: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return the class index of each position of x, and which of them the code ignores, or None.

    Ignored tokens get class 0, because the op ignores none.
    """
    if loss.target is None:
        # An entropy alone needs no target, and any class will do.
        first = derive(at, operator.getitem, x, (..., 0))
        return derive(at, torch.zeros_like, first, dtype=torch.int64), None
    target = _target_node(loss.target, at)
    if loss.primary.ignore_index is None:
        target = derive(at, torch.squeeze, target, -1)
    if value(target).dim() != value(x).dim() - 1:
        first = derive(at, operator.getitem, x, (..., 0))
        target = derive(at, torch.Tensor.reshape_as, target, first)
    if loss.ignore_index == NO_CLASS:
        return target, None
    # An ignored token has an entropy, but a loss of 0.
    ignored = derive(at, torch.eq, target, loss.ignore_index)
    return derive(at, torch.masked_fill, target, ignored, 0), ignored


def _target_node(target: Any, at: fx.Node) -> fx.Node:
    """Return the node of a target, which may be joined from several."""
    if not isinstance(target, JoinedTargets):
        return target
    parts = [_target_node(part, at) for part in target.parts]
    return derive(at, target.join, parts)


def _cross_entropy_options(loss: Loss, kinds: set[str]) -> tuple[Any, ...]:
    path = loss.path
    if path.temperature != 1.0:
        raise Refused("the logits are scaled after their softcap")
    # With label_smoothing=1 the loss is minus the mean log-probability over all classes.
    smoothing = 1.0 if "total" in kinds else 0.0
    return None, None, None, NO_CLASS, "none", smoothing, 0.0, path.softcap, path.scale


def _log_prob_parts(
    kinds: set[str], new: fx.Node, ignored: fx.Node | None, at: fx.Node
) -> dict[str, tuple[fx.Node, bool]]:
    """Return for each kind of term its node, among results of log_prob, and whether it is negated.

    The op has no target logit: it is the log-probability plus lse.
    """
    nodes = {}
    for name, position in (("log_prob", _LOG_PROB), ("entropy", _ENTROPY), ("lse", _LSE)):
        if name in kinds or (name != "entropy" and "target_logit" in kinds):
            nodes[name] = (derive(at, operator.getitem, new, position), False)
    if "target_logit" in kinds:
        result = derive(at, torch.add, nodes["log_prob"][0], nodes["lse"][0])
        nodes["target_logit"] = (result, False)
    if ignored is not None:
        unignored = derive(at, torch.masked_fill, nodes["log_prob"][0], ignored, 0.0)
        nodes["log_prob"] = (unignored, False)
    return nodes


def _cross_entropy_parts(
    kinds: set[str], new: fx.Node, classes: Any, at: fx.Node
) -> dict[str, tuple[fx.Node, bool]]:
    """Return for each kind of term its node, among results of cross_entropy, and its negation."""
    nodes = {}
    if kinds & {"lse", "target_logit", "log_prob"}:
        lse = derive(at, operator.getitem, new, _LSE)
        target_logit = derive(at, operator.getitem, new, _TARGET_LOGIT)
        nodes = {"lse": (lse, False), "target_logit": (target_logit, False)}
        if "log_prob" in kinds and "total" not in kinds:
            nodes["log_prob"] = (derive(at, operator.getitem, new, _LOSS), True)
        elif "log_prob" in kinds:
            # With label smoothing the op's loss is that of "total". The error of lse, which float32
            # rounds, keeps the difference of two large numbers exact.
            difference = derive(at, torch.sub, lse, target_logit)
            error = derive(at, operator.getitem, new, _LSE_ERROR)
            nodes["log_prob"] = (derive(at, torch.add, difference, error), True)
    if "total" in kinds:
        if not isinstance(classes, int):
            raise Refused("the number of classes is not known while the graph is compiled")
        mean = derive(at, operator.getitem, new, _LOSS)
        nodes["total"] = (derive(at, torch.mul, mean, classes), True)
    return nodes


def _as_term(
    term: TokenTerm, node: fx.Node, negative: bool, mode: tuple[Any, ...],
    at: fx.Node, state: GraphState,
) -> fx.Node:  # fmt: skip
    """Return a term's node with the sign, shape, dtype and gradient of the code's node."""
    before = value(term.node)
    if term.path.by_rows and value(node).dim() > 1:
        node = derive(at, torch.flatten, node)
    if negative != term.negative:
        node = derive(at, torch.neg, node)
    if before.dim() > value(node).dim():
        node = derive(at, torch.unsqueeze, node, -1)
    if term.kind in ("total", "entropy") and before.dtype not in (value(node).dtype, *NARROW):
        raise Refused(f"the log-probabilities are summed in {before.dtype}")
    node = _cast(node, before.dtype, at)
    if state.modes(term.node) != mode:
        node = derive(at, torch.Tensor.detach, node)
    if state.ever_written([term.node]):
        # The backward reads the op's results, so the code's write goes to a copy.
        node = derive(at, torch.clone, node)
    return node


def _cast(tensor: Any, dtype: torch.dtype, at: fx.Node) -> Any:
    if tensor is None or value(tensor).dtype == dtype:
        return tensor
    return derive(at, torch.Tensor.to, tensor, dtype)


@dataclass(frozen=True)
class LogitsSizes:
    """Nodes that read the sizes of logits.

    Attributes:
        sources: the logits, or views of them.
        readers: the nodes that read one size, each with a node of the same size of another tensor.
        shapes: the nodes that are whole shapes, from which `readers` take sizes.
    """

    sources: set[fx.Node]
    readers: dict[fx.Node, fx.Node]
    shapes: set[fx.Node]

    @property
    def nodes(self) -> set[fx.Node]:
        return {*self.readers, *self.shapes}

    def redirect(self, matched: Collection[fx.Node]) -> None:
        """Use the sizes of the other tensors, and erase nodes of `matched` that become unused."""
        for reader, size in self.readers.items():
            reader.replace_all_uses_with(size)
        for node in (*self.readers, *self.sources):
            erase_unused(node, {*matched, *self.nodes})


def sizes_of(
    matched: Collection[fx.Node], head: LinearHead, path: LogitsPath, state: GraphState
) -> LogitsSizes:
    """Return the nodes that read sizes of `matched`, the nodes from a head to its loss.

    Nodes are left out if no other tensor is known to have the size, or if they use a whole shape.
    """
    sizes = LogitsSizes(set(), {}, set())
    for source in sorted(matched, key=state.order.__getitem__):
        for user in source.users:
            if user.op != "call_method" or user.target != "size" or user.kwargs:
                continue
            is_whole_shape = len(user.args) == 1
            replacements = {}
            for reader in user.users if is_whole_shape else [user]:
                new = _size(source, reader.args[-1], head, path, reader, state)
                if new is None or (is_whole_shape and reader.target is not operator.getitem):
                    break
                replacements[reader] = new
            else:
                sizes.sources.add(source)
                sizes.readers.update(replacements)
                sizes.shapes.update([user] if is_whole_shape else [])
    return sizes


def _size(
    source: fx.Node, dim: object, head: LinearHead, path: LogitsPath, at: fx.Node, state: GraphState
) -> fx.Node | None:
    """Return the size of a dimension of `source`, read from the head's tensors before `at`."""
    leading = tuple(value(source).shape[:-1])
    if not isinstance(dim, int):
        return None
    if dim % (len(leading) + 1) == len(leading):
        return derive(at, torch.Tensor.size, head.weight, 0)
    slices_passed = tuple(node for node in path.slices if state.order[node] <= state.order[source])
    x = select_positions(head.x, dataclasses.replace(path, slices=slices_passed), at)
    if same(tuple(value(x).shape[:-1]), leading):
        return derive(at, torch.Tensor.size, x, dim % (len(leading) + 1))
    # No tensor has the size: erase the slices that were inserted for the comparison.
    while x is not head.x:
        before = x.all_input_nodes[0]
        x.graph.erase_node(x)
        x = before
    return None


def insert_logits_op(op: str, loss: Loss, state: GraphState) -> fx.Node:
    """Replace a loss by `op` of the logits, and return the op."""
    logits = loss.path.logits
    at = _insertion_point(loss, (), [logits], "logits", state)
    return _insert(op, loss, logits, (), (), loss.nodes, at, state)


def insert_head_op(op: str, loss: Loss, state: GraphState) -> fx.Node | None:
    """Replace a loss and its head by `op`, and return the op; None if no head computes the logits.

    Raises:
        Refused: the op would not compute the same, or the logits are used elsewhere.
    """
    check_computed_here(loss.path.logits)
    head = head_of(loss.path.logits)
    if head is None:
        return None
    matched = {*loss.nodes, *head.nodes}
    sizes = sizes_of(matched - {term.node for term in loss.terms}, head, loss.path, state)
    check_logits_users(matched - {term.node for term in loss.terms}, matched | sizes.nodes)
    at = _insertion_point(loss, head.nodes, head.inputs, "head", state)
    matched |= set(head.views)
    new = _insert(op, loss, head.x, (head.weight,), (total_bias(head, at),), matched, at, state)
    sizes.redirect(matched)
    return new


def _insertion_point(
    loss: Loss, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], noun: str, state: GraphState
) -> fx.Node:
    """Return the node before which to insert the op that replaces the loss and `nodes`, its head.

    `inputs` are the op's inputs without the target; `noun` names them in messages.

    Raises:
        Refused: a tensor is a DTensor or the like; the loss is inside of a torch.func transform;
            the modes differ; a tensor is written in place in between; or a part of the loss is
            used before its targets are known.
    """
    targets = target_nodes(loss.target)
    check_tensor_types([*inputs, *targets, loss.class_weight])
    results = sorted((term.node for term in loss.terms), key=state.order.__getitem__)
    if any(state.transformed(result) for result in results):
        raise Refused("it is computed inside of a torch.func transform, such as vmap")
    mode = _mode(loss, nodes, state)
    if mode is None:
        raise Refused(
            f"the loss and its {noun} are computed in different gradient or autocast modes"
        )
    matched = {*loss.nodes, *nodes}
    first = min(matched, key=state.order.__getitem__)
    users = [user for result in results for user in result.users if user not in matched]
    bound = min(state.order[node] for node in (*users, results[-1]))
    # As late as possible, because the targets have to be known.
    at = max(
        (node for node, i in state.order.items() if i <= bound and state.modes(node) == mode),
        key=state.order.__getitem__,
    )
    # One op reads a target once: a write of it between two terms of the loss would be lost.
    start = min(at, results[0], key=state.order.__getitem__)
    if state.written([*matched, *inputs], first, results[-1]) or (
        len(results) > 1 and state.written(targets, start, results[-1])
    ):
        raise Refused(f"a tensor is written in place between the {noun} and the loss")
    if any(state.order[node] >= state.order[at] for node in (*inputs, *targets)):
        raise Refused("a part of the loss is used before its targets are known")
    return at


def _mode(loss: Loss, nodes: Sequence[fx.Node], state: GraphState) -> tuple[Any, ...] | None:
    """Return the gradient and autocast modes for the op, or None if no op computes the same.

    A term that is computed under no_grad has no gradient, whatever the mode of the nodes that it is
    computed from. Any other term has to be in the mode of all these nodes.
    """
    modes = [state.modes(term.node) for term in loss.terms]
    mode = next((term_mode for term_mode in modes if term_mode[0] is not False), modes[0])
    for term, (term_grad, *others) in zip(loss.terms, modes, strict=True):
        if term_grad not in (mode[0], False):
            return None
        for node in (term.node, *term.nodes, *nodes):
            grad, *node_modes = state.modes(node)
            if (
                others != node_modes
                or others != list(mode[1:])
                or (grad != term_grad and term_grad is not False)
            ):
                return None
    return mode


def _insert(
    op: str, loss: Loss, x: fx.Node, before: tuple[Any, ...], after: tuple[Any, ...],
    matched: Collection[fx.Node], at: fx.Node, state: GraphState,
) -> fx.Node:  # fmt: skip
    """Replace the loss by an op, erase the nodes of `matched` that become unused; return the op.

    `x`, the logits or the hidden states, has the positions of the logits; `before` and `after` are
    the op's other arguments before and after the target, up to the bias.
    """
    path = loss.path
    if loss.terms[0].kind == "loss":
        options = (loss.ignore_index, loss.reduction, loss.label_smoothing)
        args = (
            as_rows(x, path, at), *before, loss.target, *after,
            loss.class_weight, None, None, *options, 0.0, path.softcap, path.scale,
        )  # fmt: skip
        return _insert_loss(at, getattr(torch.ops.liger, op).default, args, matched, state)
    x = select_positions(x, path, at)
    new, results = insert_terms(op, loss, x, before, after, at, state)
    new.meta.update({key: loss.node.meta[key] for key in ORIGIN if key in loss.node.meta})
    replace(
        [(term.node, result) for term, result in zip(loss.terms, results, strict=True)],
        matched,
        state,
    )
    return new


def _insert_loss(
    at: fx.Node, target: Any, args: tuple[Any, ...], matched: Collection[fx.Node], state: GraphState
) -> fx.Node:
    """Replace a loss by the op, cast its float32 result to the loss's dtype, and return the op."""
    with state.modes_of(at):
        new = op = emit(at, target, args)
    if value(op).dtype != value(at).dtype:
        new = derive(at, torch.Tensor.to, op, value(at).dtype)
    replace([(at, new)], matched, state)
    return op
