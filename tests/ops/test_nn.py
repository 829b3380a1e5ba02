"""The modules: torch.nn's contract where it has the module, and all options of the ops."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import liger_ops
from liger_ops import library
from liger_ops.nn import GroupNorm, LayerNorm, RMSNorm
from liger_ops.nn.derived import OptionsModule
from op_table import OPS
from op_under_test import OpUnderTest, public


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(random(*parameter.shape) + i)
    return module


MODULES = {name: getattr(liger_ops.nn, name) for name in liger_ops.nn.__all__}
MODULES = {name: cls for name, cls in MODULES.items() if issubclass(cls, nn.Module)}
# They describe what they share with another module by its name.
REFERRING = ("MHC", "Tiled")


def described(docstring: str, section: str) -> list[str]:
    """The names that a section of a docstring describes, in their order."""
    text = re.search(rf"^ *{section}:\n((?: *\n| +.*\n)*)", f"{docstring}\n", re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+(?:,\s+\w+)*): ", text[1] if text else "", re.MULTILINE)
    return [name for names in entries for name in re.split(r",\s+", names)]


@pytest.mark.parametrize("name", sorted(MODULES.keys() - REFERRING))
def test_a_docstring_describes_every_argument_once(name: str) -> None:
    cls = MODULES[name]
    docstring = inspect.getdoc(cls) or ""
    own = cls.__init__ is not nn.Module.__init__
    assert described(docstring, "Args") == (list(inspect.signature(cls).parameters) if own else [])
    assert described(docstring, "Shape") == list(inspect.signature(cls.forward).parameters)[1:]
    for section in ("Returns", "Raises", "Example"):
        assert docstring.count(f"\n{section}:\n") == 1


@pytest.mark.parametrize(
    "name", [n for n, cls in MODULES.items() if issubclass(cls, OptionsModule)]
)
def test_options_are_those_of_the_op_with_its_defaults(name: str) -> None:
    (op,) = (op for op in (*library.OPS, *library.COMPOSED) if op.replace("_", "") == name.lower())
    of_op = inspect.signature(getattr(liger_ops, op)).parameters
    inputs = inspect.signature(MODULES[name].forward).parameters
    options = inspect.signature(MODULES[name]).parameters
    assert list(options) == [parameter for parameter in of_op if parameter not in inputs]
    assert [p.default for p in options.values()] == [of_op[option].default for option in options]


# Their inputs are not those of the op that an entry describes.
OTHER_INPUTS = ("LinearTopKDivergence", "RouterLosses")


def entries_of(names: Iterable[str]) -> pytest.MarkDecorator:
    """A test of each module with each form of its op."""
    ops = {name: [op for op in OPS.values() if op.base.replace("_", "") == name.lower()]
           for name in names}  # fmt: skip
    pairs = [pytest.param(name, op, id=f"{name}-{op.id}") for name in ops for op in ops[name]]
    return pytest.mark.parametrize(("name", "op"), pairs)


def parts(module: type[nn.Module], function: str, values: dict[str, Any]) -> dict[str, Any]:
    names = inspect.signature(getattr(module, function)).parameters
    return {n: values[n] for n in names if n in values and "lora" not in n}


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@entries_of(
    n for n, cls in MODULES.items() if issubclass(cls, OptionsModule) and n not in OTHER_INPUTS
)
def test_a_module_of_options_is_its_op(name: str, op: OpUnderTest) -> None:
    """And shows them."""
    cls, values = MODULES[name], op.public_arguments(op.sample(torch.float32))
    options, inputs = parts(cls, "__init__", values), parts(cls, "forward", values)
    module = cls(**options)
    assert_same(module(**inputs), public(op.base)(**inputs, **options))
    defaults = {n: p.default for n, p in inspect.signature(cls).parameters.items()}
    shown = {n: value for n, value in (defaults | options).items()
             if cls.shows_defaults or value != defaults[n]}  # fmt: skip
    assert repr(module) == f"{name}({', '.join(f'{n}={value!r}' for n, value in shown.items())})"


# A constructor's size -> the dimension of a tensor that it is.
SIZES = {
    "hidden_size": ("x", -1), "head_dim": ("q", -1), "hc": ("x", -2), "num_experts": ("gate_up", 0),
    "intermediate_size": ("down", -1),
}  # fmt: skip
OF_PARAMETERS = (
    "RMSNorm", "FusedAddRMSNorm", "GatedRMSNorm", "ModulatedRMSNorm", "ModulatedLayerNorm",
    "RMSNormRope", "DyT", "PolyNorm", "AttnRes", "MHCCoeffs", "MoEExperts",
)  # fmt: skip


def made(cls: type[nn.Module], values: dict[str, Any], **more: Any) -> nn.Module:
    """A module of the sizes and with the options of a call."""
    sizes = {n: values[x].shape[dim] for n, (x, dim) in SIZES.items() if x in values}
    flags = {"elementwise_affine": True, "bias": True, "beta": True, **sizes, **values, **more}
    options = {n: flags[n] for n in inspect.signature(cls).parameters if n in flags}
    return cls(**{n: v is not None if isinstance(v, Tensor) else v for n, v in options.items()})


@entries_of(OF_PARAMETERS)
def test_a_module_with_parameters_is_its_op(name: str, op: OpUnderTest) -> None:
    """With another value than the default of every option; it shows the options, and starts as the
    op without weights."""
    cls = MODULES[name]
    options = {"num_groups", *inspect.signature(public(op.base)).parameters} - op.sampled.keys()
    chosen = {n: choices[-1] for n, choices in op.choices.items() if n in options}
    values = op.public_arguments(op.sample(torch.float32, **chosen))
    inputs, module = parts(cls, "forward", values), made(cls, values)
    fresh = made(cls, values)
    for parameter, tensor in module.named_parameters():
        tensor.data = values[parameter.replace("_proj", "")]
    given = {n: v for n, v in values.items() if "lora" not in n}
    assert_same(module(**inputs), public(op.base)(**given))
    # MoEExperts does not show the numbers of its activation.
    shown = inspect.signature(cls).parameters.keys() & chosen.keys()
    for option in shown - {"bias", "alpha", "up_offset"}:
        assert f"{option}={values[option]!r}" in repr(module)
    if "dtype" in inspect.signature(cls).parameters:
        empty = made(cls, values, device="meta", dtype=torch.float16)
        assert {(p.is_meta, p.dtype) for p in empty.parameters()} == {(True, torch.float16)}
    size = next(iter(inspect.signature(cls).parameters))
    if size in SIZES:
        with pytest.raises(
            ValueError, match=f"^{name}: {size} must be (at least 1|a posi).*, got 0"
        ):
            made(cls, values, **{size: 0})
    if "elementwise_affine" not in inspect.signature(cls).parameters:
        return
    bare = {"elementwise_affine": False, "offset": 0.0}
    expected = made(cls, values, **bare)(**inputs)
    assert_same(fresh(**inputs), expected)
    assert_same(made(cls, values, **bare, **{size: None})(**inputs), expected)
    module.reset_parameters()
    assert_same(module(**inputs), expected)
    with pytest.raises(ValueError, match=f"^{name}: {size} must be a positive int, got None"):
        made(cls, values, **{size: None})
    width = next(iter(inputs.values())).shape[-1]
    with pytest.raises(ValueError, match=rf"^{name}: [xq] must be \(.*, {width}\), got shape"):
        made(cls, values, **bare)(**{n: x[..., :2] for n, x in inputs.items()})


DROP_IN = [
    pytest.param(LayerNorm, (8,), {}, (3, 5, 8), id="layer_norm"),
    pytest.param(LayerNorm, (8,), {"eps": 1e-3, "bias": False}, (3, 8), id="layer_norm-no-bias"),
    pytest.param(LayerNorm, (8,), {"elementwise_affine": False}, (3, 8), id="layer_norm-none"),
    pytest.param(LayerNorm, ((5, 8),), {}, (3, 5, 8), id="layer_norm-two-dimensions"),
    pytest.param(LayerNorm, ([2, 5, 4],), {"bias": False}, (3, 2, 5, 4), id="layer_norm-three"),
    pytest.param(GroupNorm, (2, 6), {}, (3, 6, 4, 5), id="group_norm"),
    pytest.param(GroupNorm, (3, 6), {"eps": 1e-3}, (3, 6), id="group_norm-no-space"),
    pytest.param(GroupNorm, (1, 6), {"affine": False}, (3, 6, 7), id="group_norm-none"),
]


@pytest.mark.parametrize(("ours", "args", "options", "shape"), DROP_IN)
def test_drop_in_for_torch(
    ours: Callable[..., nn.Module],
    args: tuple[Any, ...],
    options: dict[str, Any],
    shape: tuple[int, ...],
) -> None:
    """Same initial values, state dict, and results in float64, where both compute alike."""
    theirs = getattr(nn, ours.__name__)(*args, **options, dtype=torch.float64)
    module = ours(*args, **options, dtype=torch.float64)
    assert isinstance(module, type(theirs))
    assert repr(module) == repr(theirs)
    assert module.state_dict().keys() == theirs.state_dict().keys()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(module.get_parameter(name), parameter), name
    randomised(theirs)
    module.load_state_dict(theirs.state_dict())
    x = random(*shape, dtype=torch.float64).requires_grad_()
    dy = random(*shape, dtype=torch.float64) + 1
    found = torch.autograd.grad(module(x), [x, *module.parameters()], dy)
    expected = torch.autograd.grad(theirs(x), [x, *theirs.parameters()], dy)
    torch.testing.assert_close(module(input=x), theirs(input=x), rtol=1e-12, atol=1e-12)
    for ours_, theirs_ in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=1e-11, atol=1e-11)


def test_layer_norm_of_any_width() -> None:
    for width in (4, 8):
        x = random(3, width)
        assert torch.equal(LayerNorm(None, elementwise_affine=False)(x), liger_ops.layer_norm(x))


REJECTED = [
    (lambda: RMSNorm("8"), TypeError, "RMSNorm: hidden_size must be an int, got str"),
    (lambda: RMSNorm(8, eps="small"), TypeError, "'eps'"),
    (lambda: RMSNorm(8, offset=1.0, elementwise_affine=False), ValueError, "offset must be 0"),
    (lambda: LayerNorm(None), ValueError, "LayerNorm: normalized_shape must be"),
    (lambda: LayerNorm(()), ValueError, "LayerNorm: normalized_shape must name a dimension"),
    (lambda: LayerNorm((8, 0)), ValueError, "normalized_shape must be at least 1, got 0"),
    (lambda: LayerNorm(8.0), TypeError, "normalized_shape must be an int, got float"),
    (lambda: GroupNorm(3, 8), ValueError, "num_groups must be a divisor of num_channels, 8"),
    (lambda: GroupNorm(0, 8), ValueError, "num_groups must be at least 1, got 0"),
    (lambda: RMSNorm(8)(random(3, 4)), ValueError, "weight must have the shape of"),
    (lambda: LayerNorm(8)(random(3, 4)), ValueError, "input must be (..., 8), got shape (3, 4)"),
    (lambda: LayerNorm((3, 8))(random(8)), ValueError, "input must be (..., 3, 8)"),
    (
        lambda: GroupNorm(2, 8)(random(3, 4)),
        ValueError,
        "weight must have the shape of (C,) for x of (N, C, *spatial)",
    ),
    (lambda: GroupNorm(2, 8)(random(8)), ValueError, "x must be (N, C, *spatial)"),
    (lambda: LayerNorm(2)(torch.ones(1, 2, dtype=torch.int64)), TypeError, "floating point"),
]


@pytest.mark.parametrize(("call", "error", "text"), REJECTED)
def test_bad_arguments_are_named(
    call: Callable[[], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
