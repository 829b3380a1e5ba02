"""`torch.compile(model, backend="liger")`, `graph_pass` and `explain`: the roads to a rewrite."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import liger_ops
from liger_ops.lowering.passes import REWRITES
from liger_ops.lowering.passes import backend as backend_module
from rewriting import Rewriter, check, values

ROOT = Path(__file__).parents[1]
ENTRY_POINTS = importlib.metadata.entry_points(group="torch_dynamo_backends", name="liger")
by_name = pytest.mark.skipif(
    not ENTRY_POINTS, reason="liger_ops is not installed, so that it has no entry point"
)


def has_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:
        return False
    return True


needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason="Inductor needs a C++ compiler, and there is none"
)


@pytest.fixture(autouse=True)
def empty_caches() -> None:
    torch._dynamo.reset()


def model(x: Tensor, weight: Tensor) -> Tensor:
    """One rms_norm and one swiglu."""
    x = F.rms_norm(x, (8,), weight, 1e-6)
    return F.silu(x * 2.0 + 1.0) * torch.tanh(x)


def inputs() -> tuple[Tensor, Tensor]:
    return values(2, 3, 8), values(8)


class Inner:
    """A backend that keeps the graphs that it is given, and runs them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(
        self, module: fx.GraphModule, example_inputs: list[Any], **options: Any
    ) -> Callable[..., Any]:
        self.graphs.append(module)
        self.options = options
        return module.forward

    def ops(self) -> list[str]:
        """The liger ops of the graphs."""
        targets = [str(node.target) for graph in self.graphs for node in graph.graph.nodes]
        return [name.split(".")[1] for name in targets if name.startswith("liger.")]


def run(code: str, *arguments: str, root: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        # Where -c imports from first.
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# By name

BY_NAME = """
import sys
import torch
import torch.nn.functional as F

def inner(module, example_inputs):
    print(*(node.target for node in module.graph.nodes if "liger" in str(node.target)))
    return module.forward

assert "liger" in torch.compiler.list_backends()
assert "liger_ops" not in sys.modules
function = lambda gate, up: F.silu(gate) * up
compiled = torch.compile(function, backend="liger", options={"inner_backend": inner})
gate, up = torch.randn(2, 8), torch.randn(2, 8)
torch.testing.assert_close(compiled(gate, up), function(gate, up))
"""


@by_name
def test_it_is_found_by_its_name_alone():
    assert run(BY_NAME).split() == ["liger.swiglu.default"]


def test_importing_the_package_does_not_load_dynamo():
    loaded = "print(sum(name.startswith('torch._dynamo') for name in sys.modules))"
    before, after = run(f"import sys, torch; {loaded}; import liger_ops; {loaded}").split()
    assert before == after


# Its options


def test_an_inner_backend_gets_the_rewritten_graph():
    inner = Inner()
    compiled = torch.compile(
        model, backend=liger_ops.backend, fullgraph=True, options={"inner_backend": inner}
    )
    torch.testing.assert_close(compiled(*inputs()), model(*inputs()))
    assert inner.ops() == ["rms_norm", "swiglu"]
    assert inner.options == {}


def test_an_inner_backend_by_its_name():
    options = {"inner_backend": "aot_eager"}
    compiled = torch.compile(model, backend=liger_ops.backend, options=options)
    x, weight = inputs()
    ours, theirs = inputs()
    torch.testing.assert_close(compiled(ours, theirs), model(x, weight))
    compiled(ours, theirs).sum().backward()
    model(x, weight).sum().backward()
    torch.testing.assert_close((ours.grad, theirs.grad), (x.grad, weight.grad))


def test_an_unknown_inner_backend():
    options = {"inner_backend": "no_such_backend"}
    compiled = torch.compile(model, backend=liger_ops.backend, options=options)
    with pytest.raises(Exception, match="no_such_backend"):
        compiled(*inputs())


@pytest.mark.parametrize(
    ("rewrites", "found"),
    [
        (["rms_norm"], ["rms_norm"]),
        ("swiglu", ["swiglu"]),
        ("all", ["rms_norm", "swiglu"]),
        ((), []),
        (["rope", "swiglu"], ["swiglu"]),
    ],
    ids=str,
)
def test_rewrites_that_are_chosen(rewrites, found):
    inner = Inner()
    options = {"inner_backend": inner, "rewrites": rewrites}
    compiled = torch.compile(model, backend=liger_ops.backend, options=options)
    torch.testing.assert_close(compiled(*inputs()), model(*inputs()))
    assert inner.ops() == found


def test_a_rewrite_that_there_is_not():
    options = {"inner_backend": Inner(), "rewrites": ["rms_norm", "no_such_rewrite"]}
    compiled = torch.compile(model, backend=liger_ops.backend, options=options)
    with pytest.raises(Exception, match="ValueError: .*'no_such_rewrite'.*linear_cross_entropy"):
        compiled(*inputs())
    with pytest.raises(ValueError, match="'no_such_rewrite'"):
        liger_ops.graph_pass(["no_such_rewrite"])


@pytest.fixture
def given_to_inductor(monkeypatch) -> list[dict[str, Any]]:
    """What Inductor is called with, in its place."""
    import torch._inductor.compile_fx as compile_fx

    calls = []

    def compile_nothing(module: fx.GraphModule, example_inputs: Any, **how: Any) -> Any:
        nodes = [node.target for node in module.graph.nodes]
        calls.append({"config": how["config_patches"], "nodes": nodes})
        return module.forward

    monkeypatch.setattr(compile_fx, "compile_fx", compile_nothing)
    return calls


def test_inductor_gets_the_mode_and_its_options(given_to_inductor):
    compile = lambda **how: torch.compile(model, backend=liger_ops.backend, **how)
    compile()(*inputs())
    torch._dynamo.reset()
    compile(mode="max-autotune-no-cudagraphs")(*inputs())
    torch._dynamo.reset()
    compile(options={"epilogue_fusion": False, "rewrites": "all"})(*inputs())
    plain, mode, options = (call["config"] for call in given_to_inductor)
    assert "max_autotune" not in plain
    assert mode["max_autotune"] is True
    assert options["epilogue_fusion"] is False
    assert "rewrites" not in options
    # By default the norms and activations stay as they are written.
    counts = [sum("liger" in str(target) for target in call["nodes"]) for call in given_to_inductor]
    assert counts == [0, 0, 2]


def test_by_default_inductor_gets_what_pays(given_to_inductor):
    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(F.silu(x) * x, weight), target)

    compiled = torch.compile(loss, backend=liger_ops.backend)
    compiled(values(3, 8), values(11, 8), torch.tensor([1, 2, 3]))
    (call,) = given_to_inductor
    ops = [str(target) for target in call["nodes"] if "liger" in str(target)]
    assert ops == ["liger.linear_cross_entropy.default"]


def test_an_option_that_inductor_has_not():
    compiled = torch.compile(model, backend=liger_ops.backend, options={"no_such_option": 1})
    with pytest.raises(Exception, match="no_such_option"):
        compiled(*inputs())


def test_fullgraph():
    def broken(x: Tensor, weight: Tensor) -> Tensor:
        x = model(x, weight)
        torch._dynamo.graph_break()
        return model(x, weight)

    inner = Inner()
    compile = lambda **how: torch.compile(
        broken, backend=liger_ops.backend, options={"inner_backend": inner}, **how
    )
    torch.testing.assert_close(compile()(*inputs()), broken(*inputs()))
    assert len(inner.graphs) == 2 and inner.ops() == ["rms_norm", "swiglu"] * 2
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile(fullgraph=True)(*inputs())


def test_dynamic():
    inner = Inner()
    compiled = torch.compile(
        model, backend=liger_ops.backend, dynamic=True, options={"inner_backend": inner}
    )
    for rows in (2, 5, 7):
        x, weight = values(rows, 3, 8), values(8)
        torch.testing.assert_close(compiled(x, weight), model(x, weight))
    assert len(inner.graphs) == 1 and inner.ops() == ["rms_norm", "swiglu"]


@needs_compiler
def test_inductor():
    """For real, with gradients, and after that a mode that the same function has not seen."""
    x, weight = inputs()
    ours, theirs = inputs()
    options = {"rewrites": "all"}
    y = torch.compile(model, backend=liger_ops.backend, dynamic=True, options=options)(ours, theirs)
    expected = model(x, weight)
    torch.testing.assert_close(y, expected)
    dy = torch.randn(2, 3, 8)
    torch.testing.assert_close(
        torch.autograd.grad(y, (ours, theirs), dy), torch.autograd.grad(expected, (x, weight), dy)
    )


# As a pass


def test_a_pass_makes_the_same_rewrites():
    whole, parts = Rewriter(), []

    def pass_backend(module: fx.GraphModule, example_inputs: Any) -> Any:
        liger_ops.graph_pass("all")(module.graph)
        module.recompile()
        parts.append(module)
        return module.forward

    torch.testing.assert_close(
        torch.compile(model, backend=pass_backend)(*inputs()), model(*inputs())
    )
    torch._dynamo.reset()
    torch.compile(model, backend=whole)(*inputs())
    targets = lambda graph: [str(node.target) for node in graph.graph.nodes]
    assert targets(parts[0]) == targets(whole.graphs[0])
    assert whole.counts() == {"rms_norm": 1, "swiglu": 1}


@needs_compiler
def test_a_pass_in_inductor(monkeypatch):
    reports = []

    def recorded(*args: Any) -> Any:
        reports.append(rewrite_graph(*args))
        return reports[-1]

    rewrite_graph = backend_module.rewrite_graph
    monkeypatch.setattr(backend_module, "rewrite_graph", recorded)
    graph_pass = liger_ops.graph_pass("all")
    with torch._inductor.config.patch(fx_graph_cache=False):
        compiled = torch.compile(model, options={"pre_grad_custom_pass": graph_pass})
        with torch._functorch.config.patch(enable_autograd_cache=False):
            torch.testing.assert_close(compiled(*inputs()), model(*inputs()))
    assert [report.counts() for report in reports] == [{"rms_norm": 1, "swiglu": 1}]


def test_the_uuid_of_a_pass():
    """The same for the same rewrites, whatever their order, and another for others."""
    uuid = lambda names=None: liger_ops.graph_pass(names).uuid()
    assert uuid() == uuid()
    assert uuid(["rope", "rms_norm"]) == uuid(["rms_norm", "rope"])
    assert uuid("all") == uuid(list(REWRITES))
    assert len({uuid(), uuid("all"), uuid(["rope"]), uuid(["rms_norm"]), uuid([])}) == 5


# Subgraphs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpointed_block_is_rewritten(dtype):
    def function(x: Tensor, weight: Tensor) -> Tensor:
        x = checkpoint(model, x, weight, use_reentrant=False)
        return model(x, weight)

    x, weight = values(2, 3, 8, dtype=dtype), values(8, dtype=dtype)
    found = check(function, x, weight, counts={"rms_norm": 2, "swiglu": 2})
    parts = [
        sum("liger" in str(node.target) for node in part.graph.nodes)
        for part in found.graphs[0].modules()
        if isinstance(part, fx.GraphModule)
    ]
    assert sorted(parts) == [2, 2]


def test_a_checkpointed_block_under_no_grad():
    """What a block is called under is not known in it, and does not change in it either."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            y = checkpoint(model, x, weight, use_reentrant=False)
        return x * y

    check(function, *inputs(), counts={"rms_norm": 1, "swiglu": 1})


def test_the_branches_of_a_condition_are_rewritten():
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, model, lambda x, weight: model(x * 2, weight), (x, weight))

    found = Rewriter()
    compiled = torch.compile(function, backend=found, fullgraph=True)
    for sign in (1, -1):
        x, weight = (one.detach() for one in inputs())
        x = sign * x.abs()
        torch.testing.assert_close(compiled(x, weight), function(x, weight))
    assert found.counts() == {"rms_norm": 2, "swiglu": 2}


# What nothing uses


def test_writes_that_nothing_uses_are_kept():
    def function(
        gate: Tensor, up: Tensor, buffer: Tensor, total: Tensor, kept: Tensor, out: Tensor
    ) -> Tensor:
        buffer.copy_(gate.detach())
        total.add_(1)
        total[0] = 7.0
        kept[..., :4].mul_(up.detach()[..., :4])
        torch.add(out, 1.0, out=out)
        return F.silu(gate) * up

    gate, up = values(2, 8), values(2, 8, seed=1)
    buffers = [torch.zeros(2, 8), torch.zeros(3), torch.ones(2, 8), torch.ones(5)]
    check(function, gate, up, *buffers, counts={"swiglu": 1})


# The caches

WARM = """
import json, sys
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

# Nothing but an op, so that there is no kernel for the compiler of C++.
def function(gate, up):
    return F.silu(gate) * up

import liger_ops
gate, up = torch.ones(2, 8, requires_grad=True), torch.ones(2, 8, requires_grad=True)
if sys.argv[1] == "pass":
    options = {"pre_grad_custom_pass": liger_ops.graph_pass("all")}
    compiled = torch.compile(function, options=options)
else:
    compiled = torch.compile(function, backend=liger_ops.backend, options={"rewrites": "all"})
compiled(gate, up).sum().backward()
aot, fx = counters["aot_autograd"], counters["inductor"]
print(json.dumps([
    aot["autograd_cache_hit"], aot["autograd_cache_miss"], aot["autograd_cache_bypass"],
    fx["fxgraph_cache_miss"], fx["fxgraph_cache_bypass"],
]))
"""


@needs_compiler
def test_a_second_start_is_warm(tmp_path):
    """And a first one again after any source of the package has changed."""
    package = tmp_path / "package"
    shutil.copytree(ROOT / "liger_ops", package / "liger_ops", symlinks=False)
    cache = str(tmp_path / "cache")

    def start(how: str = "backend") -> list[int]:
        output = run(WARM, how, root=package, TORCHINDUCTOR_CACHE_DIR=cache)
        return json.loads(output.splitlines()[-1])

    hit, miss, bypass, fx_miss, fx_bypass = start()
    assert (hit, miss, bypass, fx_bypass) == (0, 1, 0, 0) and fx_miss > 0
    assert start() == [1, 0, 0, 0, 0]
    with (package / "liger_ops/lowering/passes/swiglu.py").open("a") as source:
        source.write("\n# Another version.\n")
    hit, miss, *_ = start()
    assert (hit, miss) == (0, 1)


# explain


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8, eps=1e-6)
        self.whole = nn.RMSNorm(8)
        self.batch = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, *, broken: bool = False) -> Tensor:
        self.calls.add_(1)
        x = F.dropout(self.batch(x), 0.5)
        if broken:
            torch._dynamo.graph_break()
        x = self.norm(x) + self.norm(x * 2)
        return self.whole(F.silu(x) * x)


def test_explain_finds_what_is_used_and_what_is_not():
    explanation = liger_ops.explain(Norms(), values(4, 8))
    assert explanation.counts() == {"rms_norm": 2, "swiglu": 1}
    assert (explanation.graphs, explanation.graph_breaks) == (1, ())
    used = [finding for finding in explanation.findings if finding.used]
    (left,) = (finding for finding in explanation.findings if not finding.used)
    assert left.op == "rms_norm" and "eps=None" in left.reason
    assert "test_liger_backend.py:" in left.where
    assert "return self.whole(F.silu(x) * x)" in left.where
    assert {finding.device for finding in used} == {"cpu"}
    lines = {finding.op: finding.where for finding in used}
    assert "x = self.norm(x) + self.norm(x * 2)" in lines["rms_norm"]


def test_explain_tells_of_graph_breaks():
    explanation = liger_ops.explain(Norms(), values(4, 8), broken=True)
    assert explanation.counts() == {"rms_norm": 2, "swiglu": 1}
    assert explanation.graphs == 2
    (reason,) = explanation.graph_breaks
    assert "graph_break" in reason and "\n" not in reason


@pytest.mark.parametrize("broken", [False, True])
def test_explain_changes_nothing(broken):
    torch.manual_seed(3)
    module, x = Norms(), values(4, 8)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.get_rng_state()
    attributes = dict(vars(module))
    liger_ops.explain(module, x, broken=broken)
    assert torch.equal(torch.get_rng_state(), random)
    assert module.state_dict().keys() == state.keys()
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name
    # PyTorch's own mark on every module that torch.compile is given.
    assert set(vars(module)) - {"_is_torch_compile"} == set(attributes)
    assert all(vars(module)[name] == value for name, value in attributes.items())
    assert all(parameter.grad is None for parameter in [*module.parameters(), x])


def test_explain_prints_a_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = str(liger_ops.explain(Norms(), values(4, 8), broken=True)).splitlines()
    assert lines[0] == "2 graphs, 1 graph break"
    assert [len(line) for line in lines if len(line) > 100] == []
    (used,) = (line for line in lines if "1 x swiglu" in line)
    assert liger_ops.library.implementation(liger_ops.library.OPS["swiglu"], "") in used
    assert "left to Inductor" in " ".join(lines)
    assert "3 ops used" in lines and "1 place left" in lines


def test_explain_of_a_function():
    explanation = liger_ops.explain(model, *inputs())
    assert explanation.counts() == {"rms_norm": 1, "swiglu": 1}
    assert "0 graph breaks" in str(explanation)


def test_explain_compiles_nothing(given_to_inductor):
    liger_ops.explain(model, *inputs())
    assert given_to_inductor == []


def test_explain_of_a_model_that_raises():
    def failing(x: Tensor) -> Tensor:
        raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"):
        liger_ops.explain(failing, values(2))
