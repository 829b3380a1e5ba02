"""Recognise the ops of a hyper-connection with the rewrites of the backend."""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...rewrites import rewrite
from ...rewrites.engine.canonical import IDENTITY, calls, canonical
from ...rewrites.engine.pattern import CHEAP
from ..assumptions import Assumptions, Reads
from ..probing import NotAnOp, dtype_name, first_line, own_attributes
from ..trace import ANY_SIZES, Trace, unchanged

REWRITES = ("mhc_coeffs", "mhc_pre")
OPTIONS = ("tmax", "rms_eps", "pre_eps", "sinkhorn_eps", "post_mult")

# The dtypes of the streams and of the parameters, and whether in training.
CASES = (
    (torch.bfloat16, torch.bfloat16, True),
    (torch.bfloat16, torch.float32, False),
    (torch.float16, torch.float16, True),
    (torch.float32, torch.float32, False),
)


@dataclass(frozen=True)
class Parameters:
    """The names of the parameters fn (hc * (hc + 2), hc * hidden_size), base and scale."""

    fn: str
    base: str
    scale: str
    hc: int
    hidden_size: int


@dataclass(frozen=True)
class Connection:
    """The values of OPTIONS, and the results in the order in which the module returns them: h_pre,
    h_post and h_res of mhc_coeffs, and y of mhc_pre."""

    parameters: Parameters
    values: tuple[Any, ...]
    results: tuple[str, ...]
    assumptions: Assumptions = Assumptions((), ())

    def options(self) -> dict[str, Any]:
        return dict(zip(OPTIONS, self.values, strict=True))


def found(module: nn.Module, parameters: Parameters) -> Connection:
    """What a module computes, which must be the same in every case.

    Raises:
        NotAnOp: it is not a hyper-connection; the text gives the reason.
    """
    reads = Reads()
    connections = [_traced(module, parameters, reads, *case) for case in CASES]
    if any(one != connections[0] for one in connections):
        raise NotAnOp("it computes something else in another dtype, or in evaluation")
    dtypes = {case[0] for case in CASES}
    return replace(connections[0], assumptions=reads.assumptions(module, dtypes))


def _traced(
    module: nn.Module, of: Parameters, reads: Reads,
    dtype: torch.dtype, own_dtype: torch.dtype, training: bool,
) -> Connection:  # fmt: skip
    trace = Trace()
    rows = [ANY_SIZES[n] for n in ((2, 3) if training else (4, 5))]
    x = trace.input("x", (*rows, of.hc, of.hidden_size), dtype)
    columns = of.hc * (of.hc + 2)
    shapes = {
        of.fn: (columns, of.hc * of.hidden_size), of.base: (columns,), of.scale: (3,),
    }  # fmt: skip
    own = {name: trace.input(name, shape, own_dtype) for name, shape in shapes.items()}
    one = _copied(module, own).train(training)
    before = own_attributes(one)
    try:
        with reads.of(one), trace.running():
            # `forward` is called directly, because a call of the module would run its hooks.
            results = one.forward(x)
    except NotAnOp:
        raise
    except Exception as error:
        text = f"it fails on fake tensors ({dtype_name(dtype)}): {first_line(error)}"
        raise NotAnOp(text) from None
    if list(map(id, before.values())) != list(map(id, own_attributes(one).values())):
        raise NotAnOp("its forward changes its attributes")
    if not isinstance(results, tuple) or not all(isinstance(y, Tensor) for y in results):
        raise NotAnOp("it does not return a tuple of tensors")
    graph = trace.module(results)
    report = rewrite(graph, REWRITES, strict=True)
    if reasons := [finding.reason for finding in report.left]:
        raise NotAnOp(f"mhc_coeffs: {reasons[0]}")
    return _connection(graph.graph, of)


def _copied(module: nn.Module, parameters: dict[str, Tensor]) -> nn.Module:
    """A copy of the module with these parameters."""
    memo: dict[int, Any] = {id(module._parameters[name]): one for name, one in parameters.items()}
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise NotAnOp(f"it cannot be copied: {first_line(error)}") from None


def _connection(graph: fx.Graph, of: Parameters) -> Connection:
    ops = {
        node.target._opname: node
        for node in graph.nodes
        if getattr(node.target, "namespace", None) == "liger"
    }
    coefficients = ops.get("mhc_coeffs_forward")
    if coefficients is None:
        raise NotAnOp("it computes no mhc_coeffs")
    x, phi, b, *alphas = coefficients.args[:6]
    transposed = calls(phi, "transpose")
    inputs = (
        x, transposed and transposed.args[0], b, *(_item_of(one) for one in alphas),
    )  # fmt: skip
    wanted = ("x", of.fn, of.base, *((of.scale, i) for i in range(3)))
    if tuple(map(_named, inputs)) != wanted:
        raise NotAnOp("it is mhc_coeffs, and of other tensors than its input and its parameters")
    (output,) = (node for node in graph.nodes if node.op == "output")
    names = tuple(_result(unchanged(node), coefficients, ops.get("mhc_pre"))
                  for node in output.args[0])  # fmt: skip
    if None in names:
        raise NotAnOp("it is mhc_coeffs and more")
    values = tuple(coefficients.args[6:])
    if not all(type(value) in (int, float) for value in values):
        raise NotAnOp("its options are not numbers")
    _only(graph, output)
    return Connection(of, values, tuple(str(name) for name in names))


def _item_of(node: Any) -> Any:
    is_item = isinstance(node, fx.Node) and node.target is operator.getitem
    return (unchanged(node.args[0]), node.args[1]) if is_item else None


def _named(one: Any) -> Any:
    """A placeholder's name, or that of the placeholder of which it is an item, and the index."""
    if isinstance(one, tuple):
        return _named(one[0]), one[1]
    node = unchanged(one) if isinstance(one, fx.Node) else None
    return node.target if node is not None and node.op == "placeholder" else None


def _result(node: fx.Node, coefficients: fx.Node, collapsed: fx.Node | None) -> str | None:
    if node is collapsed and unchanged(node.args[0]) is unchanged(coefficients.args[0]):  # type: ignore[arg-type]
        return "y"
    item = node.args[1] if node.target is operator.getitem else None
    is_ours = item is not None and node.args[0] is coefficients
    return ("h_pre", "h_post", "h_res")[item] if is_ours and item in (0, 1, 2) else None  # type: ignore[index]


def _only(graph: fx.Graph, output: fx.Node) -> None:
    """Raise NotAnOp if the graph computes something beside its results."""
    needed, waiting = set(), [output]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    for node in graph.nodes:
        if node not in needed and node.op != "placeholder" and not _is_leftover(node):
            raise NotAnOp(f"it does more than compute its results: {node.name}")


def _is_leftover(node: fx.Node) -> bool:
    """Whether it is a view or a cast, or an item, of what the op takes."""
    call = canonical(node)
    is_item = node.target is operator.getitem
    return is_item or (call is not None and call.op in {*CHEAP, IDENTITY, "unbind"})
