"""The modules: torch.nn's contract where it has the module, and all options of the ops."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import liger_ops
from liger_ops import library
from liger_ops.nn import FusedAddRMSNorm, GroupNorm, LayerNorm, RMSNorm
from liger_ops.nn.derived import Options
from op_table import OPS
from op_under_test import public


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


@pytest.mark.parametrize("name", [n for n, cls in MODULES.items() if issubclass(cls, Options)])
def test_options_are_those_of_the_op_with_its_defaults(name: str) -> None:
    (op,) = (op for op in (*library.OPS, *library.COMPOSED) if op.replace("_", "") == name.lower())
    of_op = inspect.signature(getattr(liger_ops, op)).parameters
    inputs = inspect.signature(MODULES[name].forward).parameters
    options = inspect.signature(MODULES[name]).parameters
    assert list(options) == [parameter for parameter in of_op if parameter not in inputs]
    assert [p.default for p in options.values()] == [of_op[option].default for option in options]


# Their inputs are not those of the op that an entry describes.
OTHER_INPUTS = ("LinearTopKDivergence", "RouterLosses")


@pytest.mark.parametrize(
    "name",
    [n for n, cls in MODULES.items() if issubclass(cls, Options) and n not in OTHER_INPUTS],
)
def test_a_module_of_options_is_its_op(name: str) -> None:
    """And shows them."""
    cls = MODULES[name]
    op = next(o for o in OPS.values() if o.base.replace("_", "") == name.lower())
    case = op.sample(torch.float32)
    names = (argument.name for argument in op.overload()._schema.arguments)
    values = dict(zip(names, op.forward_args(case, op.tensors(case)), strict=True))
    options = {n: values[n] for n in inspect.signature(cls).parameters if n in values}
    names = inspect.signature(cls.forward).parameters
    inputs = {n: values[n] for n in names if n in values and "lora" not in n}
    module = cls(**options)
    found = module(**inputs)
    expected = public(op.base)(**inputs, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    defaults = {n: p.default for n, p in inspect.signature(cls).parameters.items()}
    shown = {n: value for n, value in (defaults | options).items()
             if cls.shows_defaults or value != defaults[n]}  # fmt: skip
    assert repr(module) == f"{name}({', '.join(f'{n}={value!r}' for n, value in shown.items())})"


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


@pytest.mark.parametrize("casting_mode", ["llama", "gemma", "none"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_is_the_op(offset: float, casting_mode: str) -> None:
    module = RMSNorm(8, 1e-3, offset, casting_mode, dtype=torch.bfloat16)
    x = random(3, 8, dtype=torch.bfloat16)
    unscaled = liger_ops.rms_norm(x, None, 1e-3, 0.0, casting_mode)
    assert torch.equal(module(x), unscaled), "a new module's weight + offset is not 1"
    randomised(module)
    expected = liger_ops.rms_norm(x, module.weight, 1e-3, offset, casting_mode)
    assert torch.equal(module(x), expected)
    module.reset_parameters()
    assert torch.equal(module(x), unscaled)


def test_fused_add_rms_norm_is_rms_norm_of_the_sum() -> None:
    norm = randomised(RMSNorm(8, offset=1.0, casting_mode="gemma"))
    module = FusedAddRMSNorm(8, offset=1.0, casting_mode="gemma")
    module.load_state_dict(norm.state_dict())
    x, residual = random(3, 8), random(1, 3, 8)[0]
    y, s = module(x, residual)
    assert torch.equal(s, x + residual)
    assert torch.equal(y, norm(x + residual))


def test_without_parameters() -> None:
    x = random(3, 8)
    assert torch.equal(RMSNorm(8, elementwise_affine=False)(x), liger_ops.rms_norm(x))
    for width in (4, 8):
        x = random(3, width)
        assert torch.equal(RMSNorm(None, elementwise_affine=False)(x), liger_ops.rms_norm(x))
        assert torch.equal(LayerNorm(None, elementwise_affine=False)(x), liger_ops.layer_norm(x))


def test_extra_repr_names_every_option() -> None:
    assert repr(RMSNorm(8, 1e-5, 1.0, "gemma")) == (
        "RMSNorm(8, eps=1e-05, offset=1.0, casting_mode='gemma', elementwise_affine=True)"
    )
    assert repr(FusedAddRMSNorm(None, elementwise_affine=False)) == (
        "FusedAddRMSNorm(None, eps=1e-06, offset=0.0, casting_mode='llama',"
        " elementwise_affine=False)"
    )


def test_device_and_dtype() -> None:
    for module in (
        RMSNorm(8, device="meta", dtype=torch.float16),
        FusedAddRMSNorm(8, device="meta", dtype=torch.float16),
        LayerNorm(8, device="meta", dtype=torch.float16),
        GroupNorm(2, 8, device="meta", dtype=torch.float16),
    ):
        for parameter in module.parameters():
            assert parameter.is_meta
            assert parameter.dtype is torch.float16


def test_copies_are_independent() -> None:
    module = RMSNorm(8)
    copied = copy.deepcopy(module)
    nn.init.zeros_(copied.weight)
    assert module.weight is not None
    assert (module.weight == 1).all()


REJECTED = [
    (lambda: RMSNorm(0), ValueError, "RMSNorm: hidden_size must be at least 1, got 0"),
    (lambda: RMSNorm("8"), TypeError, "RMSNorm: hidden_size must be an int, got str"),
    (lambda: RMSNorm(None), ValueError, "RMSNorm: hidden_size must be a positive int, got None"),
    (lambda: RMSNorm(8, eps="small"), TypeError, "'eps'"),
    (lambda: RMSNorm(8, offset=1.0, elementwise_affine=False), ValueError, "offset must be 0"),
    (lambda: FusedAddRMSNorm(-8), ValueError, "FusedAddRMSNorm: hidden_size must be at least 1"),
    (lambda: LayerNorm(None), ValueError, "LayerNorm: normalized_shape must be"),
    (lambda: LayerNorm(()), ValueError, "LayerNorm: normalized_shape must name a dimension"),
    (lambda: LayerNorm((8, 0)), ValueError, "normalized_shape must be at least 1, got 0"),
    (lambda: LayerNorm(8.0), TypeError, "normalized_shape must be an int, got float"),
    (lambda: GroupNorm(3, 8), ValueError, "num_groups must be a divisor of num_channels, 8"),
    (lambda: GroupNorm(0, 8), ValueError, "num_groups must be at least 1, got 0"),
    (lambda: RMSNorm(8)(random(3, 4)), ValueError, "weight must have the shape of"),
    (lambda: RMSNorm(8, elementwise_affine=False)(random(3, 4)), ValueError, "x must be (..., 8)"),
    (lambda: FusedAddRMSNorm(8)(random(3, 8), random(4, 8)), ValueError, "residual"),
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
