"""Properties of registration that the tests of every op do not cover: devices, autocast, caches."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._library.autograd import make_autograd_impl

import liger_ops
from liger_ops import library
from liger_ops.autograd import vector_jacobian
from liger_ops.compile_cache import package_hash
from liger_ops.derived import schema_of
from op_checks import as_tuple
from op_table import OPS
from op_under_test import OpUnderTest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
@pytest.mark.parametrize("key", ("AutocastCUDA", "AutocastXPU", "AutocastCPU"))
def test_autocast_rule_exists_where_pytorch_has_one(op: OpUnderTest, key: str) -> None:
    has_rule = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_rule(f"liger::{op.name}", key) == op.has_autocast_rule(key)


def test_cpu_autocast_leaves_the_dtypes() -> None:
    x = torch.randn(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert liger_ops.rms_norm(x, torch.randn(8)).dtype is torch.float32
        assert liger_ops.rms_norm(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("training", (False, True))
def test_dynamo_does_not_trace_into_an_op(training: bool) -> None:
    """Otherwise Dynamo would compile the code inside the ops of a function that it cannot compile,
    and warn."""
    graphs: list[torch.fx.GraphModule] = []

    def function(x: Tensor) -> Tensor:
        for _ in range(1):
            try:
                torch._dynamo.graph_break()
            finally:
                y = library.OPS["rms_norm"].overload(x)
        return y

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=lambda graph, inputs: graphs.append(graph) or graph)
    x = torch.randn(2, 8, requires_grad=training)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = compiled(x)
    assert torch.equal(y, function(x))
    assert not graphs


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
# router_losses takes a list of tensors.
@pytest.mark.parametrize("name", [name for name in library.COMPOSED if name != "router_losses"])
def test_an_op_that_is_made_of_others_refuses_what_they_do(name: str) -> None:
    op = getattr(liger_ops, name)
    schema = getattr(torch.ops.liger, name).default._schema
    first, *others = (a.name for a in schema.arguments if str(a.type) == "Tensor")
    sizes = {
        a.name: 1
        for a in schema.arguments
        if str(a.type) in ("List[int]", "float", "int") and not a.has_default_value()
    }
    x = torch.randn(2, 8)
    for wrong, got in (
        (None, "a tensor, got None"),
        (torch.nested.nested_tensor([x, x]), "a dense tensor, .* got a nested tensor"),
        (x.to_sparse(), "a dense tensor, .* got a tensor of layout torch.sparse_coo"),
    ):
        with pytest.raises(TypeError, match=f"^{name}: {first} must be {got}"):
            op(wrong, *(x for _ in others), **sizes)


@pytest.mark.parametrize("name", library.COMPOSED)
def test_an_op_that_is_made_of_others_is_documented(name: str) -> None:
    text = getattr(liger_ops, name).__doc__
    assert all(part in text for part in ("Args:", "Returns:", "Raises:", "Example:"))
    assert "Source:" in text or name == "linear_log_prob"


def test_an_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="'wait'.*liger::rms_norm"):
        liger_ops.rms_norm(torch.randn(2, 8), wait=1)


def test_infer_device_is_one_that_works() -> None:
    device = liger_ops.infer_device()
    assert torch.ones(2, device=device).sum().item() == 2


def test_a_schema_is_the_definitions_signature() -> None:
    def op(
        x: Tensor, bias: Tensor | None = None, eps: float = 1e-5, mask: list[bool] = (True, False)
    ) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    arguments = "Tensor x, Tensor? bias=None, float eps=1e-05, bool[2] mask=[True, False]"
    assert schema_of(op) == f"({arguments}) -> (Tensor, Tensor?)"
    assert schema_of(op, "y rstd") == f"({arguments}) -> (Tensor y, Tensor? rstd)"


def test_a_signature_that_is_no_schema_is_refused() -> None:
    def op(x: Tensor, names: dict[str, int]) -> Tensor:
        raise NotImplementedError

    with pytest.raises(TypeError, match="^op: names must be annotated with one of Tensor, .* got"):
        schema_of(op)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_pytorchs_own_autograd_runs_the_registered_formula(op: OpUnderTest) -> None:
    """The formula is registered with `register_autograd`; the project's kernel overrides PyTorch's,
    and both give the same gradients."""
    record, case = library.OPS[op.name], op.sample(torch.float64)
    args = op.forward_args(case, op.tensors(case))
    floating = [isinstance(a, Tensor) and a.is_floating_point() for a in args]
    wanted = [i for i, has in enumerate(floating) if has and op.has_gradient(i)]
    own = make_autograd_impl(record.overload, record.custom_op)
    found = []
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for run in (record.overload, lambda *a: own(keys, *a)):
        leaves = list(args)
        for i in wanted:
            leaves[i] = args[i].detach().clone().requires_grad_()
        results = op.results(run(*leaves))
        sum(result.sum() for result in results).backward()
        found.append([leaves[i].grad for i in wanted])
    assert all(grad is not None for grad in found[0])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", liger_ops.distributed.__all__)
def test_a_function_of_process_groups_has_the_ops_arguments(name: str) -> None:
    function, op = getattr(liger_ops.distributed, name), getattr(liger_ops, name)
    own, given = (inspect.signature(f).parameters for f in (function, op))
    assert [str(own[argument]) for argument in given] == list(map(str, given.values()))
    described = function.__doc__.partition("Args:\n")[2].partition("Returns:\n")[0]
    assert all(re.search(rf"^    .*\b{argument}\b.*: ", described, re.M) for argument in own)
    with pytest.raises(TypeError, match="nonsense"):
        function(nonsense=1)


def test_the_arguments_of_derived_ops() -> None:
    """Derived ops have the arguments that their forms leave in and add, optional where marked."""
    head = liger_ops.linear_cross_entropy
    parameters = inspect.signature(liger_ops.linear_cross_entropy_forward).parameters
    assert set(inspect.signature(head).parameters) - set(parameters) == {"lora_a", "lora_scale"}
    assert list(parameters)[-3:] == ["gradient_mask", "lora_x", "lora_b"]
    assert "    x, weight, target" in (liger_ops.linear_cross_entropy_forward.__doc__ or "")
    gradient = library.OPS["linear_cross_entropy_backward"]
    arguments = {argument.name: argument for argument in gradient.schema.arguments}
    assert str(arguments["dloss"].type) == "Optional[Tensor]"
    assert arguments["dlora_b"].has_default_value() and not arguments["dx"].has_default_value()
    assert "return_predicted" not in arguments and "chunk_bytes" in arguments


def is_derived(op: OpUnderTest) -> bool:
    definition = inspect.unwrap(library.OPS[op.backward_name].definition)
    return Path(definition.__code__.co_filename).name == "derived.py"


@pytest.mark.parametrize("op", filter(is_derived, OPS.values()), ids=repr)
def test_a_derived_gradient_is_computed_in_float32_and_rounded_once(op: OpUnderTest) -> None:
    case = op.sample(torch.bfloat16)
    args = op.backward_args(case, op.tensors(case))
    floating = [isinstance(arg, Tensor) and arg.is_floating_point() for arg in args]
    wide = [arg.float() if is_real else arg for arg, is_real in zip(args, floating, strict=True)]
    found, exact = (as_tuple(library.OPS[op.backward_name].definition(*a)) for a in (args, wide))
    for value, truth in zip(found, exact, strict=True):
        assert value is truth is None or torch.equal(value, truth.to(value.dtype))


def test_a_derived_gradient_is_computed_in_the_calling_thread() -> None:
    """A trace, which turns autograd's threads off, does not reach those of a GPU."""
    threads = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            threads.append(torch._C._is_multithreading_enabled())
            return grad

    x = torch.randn(3)
    (found,) = vector_jacobian(Noted.apply, [x], [0], [x])
    assert torch.equal(found, x) and threads == [False]


def test_caches_are_tagged_with_the_packages_sources(tmp_path: Path) -> None:
    """The key of the compile caches depends on every source; a tag set by the user is kept."""
    assert f"liger_ops={package_hash()}" in torch.compiler.config.cache_key_tag.split(";")
    code = (
        "import torch.compiler.config as c; c.cache_key_tag = 'mine'; import liger_ops;"
        "print(c.cache_key_tag)"
    )
    tags = []
    for change in ("", "\n# changed\n"):
        copy = tmp_path / f"copy{len(tags)}"
        for name in ("liger_ops", "meta", "lowering"):
            shutil.copytree(ROOT / name, copy / name)
        with (copy / "meta" / "rms_norm.py").open("a") as file:
            file.write(change)
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=copy
        )
        assert run.returncode == 0, run.stderr
        tags.append(run.stdout.strip())
    assert all(tag.startswith("mine;liger_ops=") for tag in tags)
    assert tags[0] != tags[1]


def test_every_op_is_there_after_the_import_alone() -> None:
    """Those of graphs, too: a program that was saved may call them."""
    from liger_ops.ops.attention.packed_documents import NAMESPACE

    code = (
        "import torch, liger_ops; cu_seqlens = torch.tensor([0, 2, 5, 5]);"
        # A default device is for the user's tensors.
        "torch.set_default_device('meta');"
        f"graph = torch.ops.{NAMESPACE};"
        "print(graph.document_bounds(cu_seqlens, None, None).tolist(), graph.packed_documents)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.stdout.startswith("[2, 3, 0, 0, 2, 5, 5, 2, 3, 0] "), run.stderr


# The files of an op's kernels, where another file of the op's name has its host code.
KERNELS = {"log_prob": "cross_entropy", "mhc_coeffs": "mhc_coeffs_kernels"}


def test_implementation_names_the_file() -> None:
    for name in {op.name for op in OPS.values()}:
        op, file = library.OPS[name], name.removesuffix("_forward")
        for device in ("cuda", "npu"):
            named = library.implementation(op, device)
            assert (ROOT / f"{named.replace('.', '/')}.py").exists()
            # Several ops may launch the kernels of one file.
            if [*(ROOT / "lowering" / device).rglob(f"{file}.py")]:
                name_of_file = KERNELS.get(file, file)
                assert re.fullmatch(rf"lowering\.{device}\.(\w+\.)*{name_of_file}", named)
        assert library.implementation(op, "cpu") == "definition"
