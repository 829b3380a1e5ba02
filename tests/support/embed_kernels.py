"""Trace the cuda kernels' host code as Inductor does for a package, without a GPU.

    TRITON_INTERPRET=0 python tests/support/embed_kernels.py

prints a JSON record per op, in bfloat16 with a dynamic number of rows: how many kernels are
launched, and which of its results no kernel writes.
"""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._inductor.fx_passes.post_grad import pass_patterns
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import liger_ops
import paths  # noqa: F401
from liger_ops import inductor
from op_table import OPS

NAMES = (
    *("rms_norm", "fused_add_rms_norm", "layer_norm", "swiglu", "rope", "rms_norm_rope"),
    *("moe_experts_forward", "linear_cross_entropy_forward-mean"),
)
ROWS = 5
LAUNCH = torch.ops.higher_order.triton_kernel_wrapper_functional
VIEWS = {"view", "permute", "slice", "expand", "as_strided"}


def with_any_rows(mode: FakeTensorMode, name: str, x: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor whose first dimension, if it is that of the rows, is dynamic."""
    rows = x.shape[:1] == (ROWS,)
    sizes = [DimDynamic.DUCK if rows and i == 0 else DimDynamic.STATIC for i in range(x.dim())]
    source = torch._dynamo.source.ConstantSource(name)
    return mode.from_tensor(
        x.clone(memory_format=torch.contiguous_format), source=source,
        symbolic_context=StatelessSymbolicContext(sizes),
    )  # fmt: skip


def is_allocation(node: Any) -> bool:
    """Return whether a node is memory, or a view of memory, that no kernel has written."""
    name = str(node.target).removeprefix("aten.").split(".")[0]
    return name == "empty" or (name in VIEWS and is_allocation(node.args[0]))


def record_of(name: str) -> dict[str, Any]:
    op = OPS[name]
    case = op.sample(torch.bfloat16, rows=ROWS)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    leaves, spec = pytree.tree_flatten(op.forward_args(case, op.tensors(case)))
    tensors = {i: x for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}

    def host_code(*values: torch.Tensor) -> Any:
        call = {**dict(enumerate(leaves)), **dict(zip(tensors, values, strict=True))}
        return op.kernel("cuda")(*pytree.tree_unflatten(list(call.values()), spec))

    values = [with_any_rows(mode, f"argument {i}", x) for i, x in tensors.items()]
    with mode, V.set_aot_compilation(True), torch.no_grad():
        graph = inductor._traced_launches("cuda", host_code, values).graph
    results = [x for x in pytree.tree_leaves(graph.output_node().args) if isinstance(x, fx.Node)]
    return {
        "op": name,
        "launches": len(graph.find_nodes(op="call_function", target=LAUNCH)),
        "unwritten": [i for i, node in enumerate(results) if is_allocation(node)],
    }


def check_the_pass() -> None:
    """Check Inductor's own pass on fake tensors of a GPU: it replaces ops by launches with the
    strides of their trace, and fixes no size."""
    torch.cuda.current_device = lambda: 0
    properties = SimpleNamespace(major=9, multi_processor_count=132)
    torch.cuda.get_device_properties = lambda index: properties
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = with_any_rows(mode, "x", torch.empty(ROWS, 4, 64))
    with mode, V.set_aot_compilation(True):
        x = torch.empty(x.shape, device="cuda")
        graph = make_fx(lambda x: liger_ops.swiglu(liger_ops.rms_norm(x), x))(x)
        pass_patterns[0].apply(graph)
    launches = graph.graph.find_nodes(op="call_function", target=LAUNCH)
    assert len(launches) == 2 and launches[0].kwargs["kwargs"]["N"] == 64
    assert all("eager_input_vals" in node.meta for node in launches)
    assert "liger" not in str(graph.graph) and not mode.shape_env.guards


def check_a_question_is_refused() -> None:
    """Check that host code which reads a dynamic size is refused; the size stays dynamic."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = with_any_rows(mode, "x", torch.empty(ROWS, 4))
    with mode:
        for ask in (lambda x: x[:3] if x.shape[0] > 3 else x, lambda x: x * int(x.shape[0])):
            try:
                inductor._traced_launches("cuda", ask, [x])
            except ValueError as error:
                assert "depends on a dynamic size" in str(error)
            else:
                raise AssertionError("a question was answered")
    env = mode.shape_env
    assert not env.guards and not env.replacements


if __name__ == "__main__":
    driver.set_active(SimpleNamespace(get_current_target=partial(GPUTarget, "cuda", 90, 32)))
    for name in NAMES:
        print(json.dumps(record_of(name)))
    check_the_pass()
    check_a_question_is_refused()
