"""Attention whose mask is a predicate of indices and data runs in flex_attention.

A dense mask costs its memory and a slower kernel: scaled_dot_product_attention with a mask computes
every block of scores. flex_attention computes only the blocks in which something is visible. The
mask's function is read from the graph (`mask`): causal, sliding windows, chunks, padding, packed
documents, and any condition on indices and on tensors that are read per token. The block mask is
computed in the graph, once for all layers that share a mask, from bounds per block, so that no
dense mask is in memory.

A query that sees no key gets 0 from scaled_dot_product_attention with a boolean mask and from
flex_attention, and no gradient. With a mask of finite numbers that is added to the scores such a
query gets the mean of all values; attention is left unless every query is proved to see a key.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .attention import attentions, obstacle
from .canonical import same, value
from .causal_attention import write
from .emitter import Emitter
from .graph_state import GraphState, erase_unused, fake_mode_of
from .grouped_attention import FLASH_DTYPES, FLASH_HEAD_DIM, HEADS, repeated, unrepeated
from .mask.algebra import Condition, Unknown, data_of, is_condition, known
from .mask.blocks import BLOCK, Blocks, Bounds, dense_datum
from .mask.predicate import predicate, read_tensors
from .mask.proof import departure, visible_keys
from .mask.scopes import Scope, parts, scopes
from .report import Report
from .rewrite import Refused, check_results

OP = "masked_attention"
# Devices on which flex_attention has a fast kernel, forward and backward.
DEVICES = ("cuda",)
LEAST_HEAD_DIM = 16
_JUDGED = "liger_ops.masked_attention"


def rewrite(graph: fx.Graph, report: Report) -> None:
    """Rewrite the attention calls of a graph, and of the checkpointed blocks that it calls."""
    states = {part: GraphState(part) for part in parts(graph)}
    made: dict[tuple[fx.Node, Any], Blocks] = {}
    for scope in scopes(graph, data=True):
        for node, arguments in attentions(scope.graph, OP, report):
            mask = arguments["attn_mask"]
            if mask is None or arguments["is_causal"] is not False or node.meta.get(_JUDGED):
                continue
            node.meta[_JUDGED] = True
            try:
                new = _lower(node, arguments, scope, states, made)
            except (Refused, Unknown) as refused:
                report.refused(OP, node, str(refused))
                continue
            report.used(OP, new)


def _lower(
    node: fx.Node,
    arguments: dict[str, Any],
    scope: Scope,
    states: Mapping[fx.Graph, GraphState],
    made: dict[tuple[fx.Node, Any], Blocks],
) -> fx.Node:
    mask = arguments["attn_mask"]
    reason = obstacle(node, arguments, states[scope.graph]) or _unsupported(node, arguments)
    if reason is not None:
        raise Refused(reason)
    condition = _condition(mask, arguments, scope)
    if reason := write(scope.functions, mask, states.values()):
        raise Refused(reason)
    home, origin = scope.home(mask)
    if origin.op == "placeholder":
        raise Refused(f"its mask {origin.name} is an input of the graph, a dense tensor")
    module = predicate(condition)
    for tensor in read_tensors(condition):
        if tensor.graph is not home.graph and home.outer is None:
            raise Refused(f"its mask reads {tensor.name} in another graph")
    key = (origin, str(module.code))
    if key not in made:
        made[key] = _blocks(condition, origin, home, arguments)
    new = _attend(node, arguments, scope, module, made[key], condition)
    check_results({node: value(new)}, states[scope.graph])
    node.replace_all_uses_with(new)
    repeats = [(arguments[name], repeated(arguments[name], HEADS)) for name in ("key", "value")]
    scope.graph.erase_node(node)
    for tensor, repeat in repeats:
        if repeat is not None:
            erase_unused(tensor, repeat.nodes)
    erase_unused(mask, set(scope.functions.read(mask)) - set(read_tensors(condition)))
    return new


def _unsupported(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    """Why flex_attention does not run these tensors, or not fast; None if it does."""
    query, key, values = (value(arguments[name]) for name in ("query", "key", "value"))
    if query.device.type not in DEVICES:
        return f"flex_attention, which takes masks by block, has no fast kernel on {query.device}"
    if not query.dim() == key.dim() == values.dim() == 4:
        return "flex_attention takes tensors of 4 dimensions"
    if not same(query.shape[0], key.shape[0]) or not same(query.shape[0], values.shape[0]):
        return "its queries and keys are broadcast against each other"
    if value(node).dtype not in FLASH_DTYPES:
        return f"flex_attention is slow in {value(node).dtype}"
    for size in (query.shape[-1], values.shape[-1]):
        if not isinstance(size, int) or not LEAST_HEAD_DIM <= size <= FLASH_HEAD_DIM:
            return f"flex_attention takes heads of {LEAST_HEAD_DIM} to {FLASH_HEAD_DIM} numbers"
    for tensor in (query, key, values):
        if not isinstance(tensor.shape[HEADS], int):
            return "its number of heads is not fixed"
    if query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) < (8, 0):
        return "flex_attention needs compute capability 8.0"
    return None


def _condition(mask: Any, arguments: dict[str, Any], scope: Scope) -> Condition:
    """When a query sees a key, as a function of (b, h, i, j)."""
    query, keys = value(arguments["query"]), value(arguments["key"]).shape[-2]
    shape = (*query.shape[:-1], keys)
    if not isinstance(mask, fx.Node) or not isinstance(value(mask), Tensor):
        raise Refused("its mask is not a tensor of the graph")
    if value(mask).requires_grad:
        raise Refused("its mask has a gradient")
    mask_shape = value(mask).shape
    for axis, size in enumerate(mask_shape, start=-len(mask_shape)):
        if not known(size == 1) and not known(size == shape[axis]):
            raise Refused(f"its mask of {tuple(mask_shape)} may not fit its scores of {shape}")
    try:
        function = scope.functions.value(mask)
        condition = visible_keys(function)
    except Unknown as unknown:
        raise Refused(f"its mask cannot be analysed: {unknown}") from None
    if isinstance(condition, bool):
        raise Refused("its mask is the same everywhere")
    if (datum := dense_datum(data_of(condition))) is not None:
        raise Refused(f"its mask reads {datum.node.name} for each query and key, a dense tensor")
    if not is_condition(function) and departure(condition, shape) is not None:
        raise Refused("its mask adds numbers, and a query that sees no key would get another value")
    return condition


def _blocks(condition: Condition, mask: fx.Node, home: Scope, arguments: dict[str, Any]) -> Blocks:
    """Emit the block mask after `mask`, in the graph that computes it."""
    emit = Emitter(mask.next, value(mask))
    query, key = value(arguments["query"]), value(arguments["key"])
    wanted = (*query.shape[:-1], key.shape[-2])
    sizes = {
        axis: size if isinstance(size, int) else _symbolic(emit, mask, axis, size)
        for axis, size in enumerate(wanted, start=-4)
    }
    tensors = {tensor: home.inward(tensor) for tensor in read_tensors(condition)}
    return Bounds(emit, sizes, tensors, value(mask).device).blocks(condition)


def _symbolic(emit: Emitter, mask: fx.Node, axis: int, size: Any) -> Any:
    """A node for a symbolic size of the scores, in the graph that computes the mask."""
    shape = value(mask).shape
    if -axis <= len(shape) and known(shape[axis] == size):
        return emit.size(mask, axis)
    for node in mask.graph.nodes:
        if isinstance(value(node), torch.SymInt) and known(value(node) == size):
            return node
        if node is mask:
            break
    raise Refused(f"the size {size} of its scores is not known where its mask is computed")


def _attend(
    node: fx.Node,
    arguments: dict[str, Any],
    scope: Scope,
    module: fx.GraphModule,
    blocks: Blocks,
    condition: Condition,
) -> fx.Node:
    """Insert the call of flex_attention before `node`."""
    from torch._higher_order_ops.flex_attention import flex_attention

    emit = Emitter(node, value(node))
    query, key, values = (
        _prepared(emit, node, arguments, name) for name in ("query", "key", "value")
    )
    scale = arguments.get("scale")
    if scale is None:
        scale = 1.0 / math.sqrt(value(query).shape[-1])
    elif not isinstance(scale, (int, float)):
        raise Refused("its scale is not a constant")
    lengths = (emit.size(query, -2), emit.size(key, -2))
    tensors = tuple(scope.inward(tensor) for tensor in read_tensors(condition))
    owner = scope.graph.owning_module
    score, mask = (
        _submodule(emit, owner, name, part)
        for name, part in (("liger_score", _unchanged_scores()), ("liger_mask", module))
    )
    args = (
        query,
        key,
        values,
        score,
        _block_tuple(blocks.moved(scope.inward), lengths, mask),
        float(scale),
        _kernel_options(*(value(one) for one in (query, key, values))),
        (),
        tensors,
    )
    result = _result(node, *args)
    with scope.graph.inserting_before(node):
        call = scope.graph.call_function(flex_attention, args)
    call.meta.update({**node.meta, "example_value": result})
    call.meta.pop(_JUDGED, None)
    out = emit(operator.getitem, call, 0)
    out.meta.update({**node.meta, "example_value": result[0]})
    return out


def _prepared(emit: Emitter, node: fx.Node, arguments: dict[str, Any], name: str) -> Any:
    """An operand without repeated heads, in the dtype of the result, which autocast may lower."""
    tensor = arguments[name]
    if name != "query":
        repeat = repeated(tensor, HEADS)
        both = repeated(arguments["key"], HEADS), repeated(arguments["value"], HEADS)
        if repeat is not None and None not in both and both[0].times == both[1].times:  # type: ignore[union-attr]
            tensor = unrepeated(repeat, node)
    if value(tensor).dtype != value(node).dtype:
        tensor = emit(torch.Tensor.to, tensor, value(node).dtype)
    return tensor


def _block_tuple(blocks: Blocks, lengths: tuple[Any, Any], mask: fx.Node) -> tuple[Any, ...]:
    """The block mask in the form of this version of PyTorch, which `BlockMask` knows."""
    from torch.nn.attention.flex_attention import BlockMask

    nodes = {
        f"{full}{side}_{what}": node
        for side, parts in (
            ("kv", {"num_blocks": blocks.row_counts, "indices": blocks.rows}),
            ("q", {"num_blocks": blocks.column_counts, "indices": blocks.columns}),
        )
        for what, pair in parts.items()
        for full, node in zip(("", "full_"), pair, strict=True)
    }
    stand_ins: dict[str, Any] = {name: torch.empty(1, 1, 1, 1) for name in nodes}
    form = BlockMask(
        seq_lengths=(BLOCK, BLOCK), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=noop, **stand_ins
    ).as_tuple()
    by_identity = {id(stand_ins[name]): node for name, node in nodes.items()} | {id(noop): mask}
    return (*lengths, *(by_identity.get(id(part), part) for part in form[2:]))


def noop(*indices: Tensor) -> Tensor:
    raise AssertionError("stands for the predicate in a block mask")


def _unchanged_scores() -> fx.GraphModule:
    graph = fx.Graph()
    score, *_ = (graph.placeholder(name) for name in ("score", "b", "h", "i", "j"))
    graph.output(score)
    return fx.GraphModule(torch.nn.Module(), graph)


def _submodule(emit: Emitter, owner: Any, name: str, module: fx.GraphModule) -> fx.Node:
    count = sum(one.startswith(name) for one, _ in owner.named_children())
    owner.add_submodule(f"{name}_{count}", module)
    with emit.before.graph.inserting_before(emit.before):
        return emit.before.graph.get_attr(f"{name}_{count}")


def _kernel_options(query: Tensor, key: Tensor, values: Tensor) -> dict[str, Any]:
    """The options that flex_attention() itself sets."""
    from torch.nn.attention.flex_attention import AuxRequest, _apply_kernel_options

    return dict(_apply_kernel_options(query, key, values, False, None, AuxRequest(lse=True)))


def _result(node: fx.Node, *arguments: Any) -> tuple[Tensor, ...]:
    """What flex_attention returns for these arguments: the output, lse and the largest scores."""
    from torch._higher_order_ops.flex_attention import flex_attention_fake_impl

    with fake_mode_of([value(node)]), torch.no_grad():
        out, *rest = flex_attention_fake_impl(*pytree.tree_map(value, arguments))
    return out.requires_grad_(value(node).requires_grad), *rest
