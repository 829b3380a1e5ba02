"""Fuse the attention of transformers models, through transformers' registries.

A model's configuration names its attention implementation. `fuse` registers implementations of its
own in the registries of attention and mask functions, and writes their names into configurations.
They call the fastest engine for the masks that it takes, and the model's own functions otherwise. A
probe finds out whether the model's own attention code has sinks or a soft cap.

The model that makes the masks also gets a class of its own. Its forward looks for packed documents
in position_ids that it is given, and not in those that it makes itself; and a copy in another
process, which creates the class again, registers the names there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.attention.varlen_attention import FLASH_HEAD_DIM
from ...rewrites.attention.masked_attention import LEAST_HEAD_DIM
from .. import classes
from ..layers.rebinding import global_names
from ..planning import FusionPlan
from ..probing import DEVICE, NotAnOp, undisturbed
from ..versions import read
from .attention_function import attention_function, documents_function, mask_function
from .attention_positions import CAUSAL, makes_positions, reading_positions, takes_positions

# Different sizes, so that no two axes can be confused.
BATCH, HEADS, KEY_HEADS, LENGTH, SIZE = 2, 6, 3, 5, 4

# A finite score in float32 too, for keys that are not visible.
MASKED = -1e9


CAP = 0.8


def addition(function: Any) -> str | None:
    """Return "sinks" or "softcap" if an attention function of a model's file adds that to softmax
    attention, else None.

    The function runs in float64, and is compared with the equation. A sink is a score for each
    query head that adds exp(sink) to the sum of the softmax; the function may take the sinks as its
    argument `s_aux` or from the module. A soft cap replaces scores by cap * tanh(scores / cap); the
    function takes it as its argument `softcap`, which may be None. It returns its weights too.
    """
    with undisturbed():
        if _computes(function, has_sinks=True, cap=None):
            return "sinks"
        both = (_computes(function, has_sinks=False, cap=cap) for cap in (None, CAP))
        return "softcap" if all(both) else None


def _computes(function: Any, has_sinks: bool, cap: float | None) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query = random(BATCH, HEADS, LENGTH, SIZE)
    key, value = random(BATCH, KEY_HEADS, LENGTH, SIZE), random(BATCH, KEY_HEADS, LENGTH, SIZE)
    sinks, scale = random(HEADS) if has_sinks else None, 0.7
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BATCH, 1, -1, -1)
    mask = torch.zeros(visible.shape, dtype=torch.float64)
    mask = mask.masked_fill(~visible, MASKED)
    module: Any = types.SimpleNamespace(
        num_key_value_groups=HEADS // KEY_HEADS, head_dim=SIZE, scaling=scale, training=True
    )
    arguments: dict[str, Any] = {"scaling": scale, "dropout": 0.0, "softcap": cap}
    if sinks is not None:
        module.sinks = arguments["s_aux"] = sinks
    try:
        y, *_ = function(module, query, key, value, mask, **arguments)
    except Exception:
        # The code takes other arguments, or needs as many heads of keys as of queries.
        return False
    repeats = HEADS // KEY_HEADS
    scores = query @ key.repeat_interleave(repeats, dim=1).mT * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores + mask
    weights = exact = scores.softmax(dim=-1)
    if sinks is not None:
        column = sinks.view(1, HEADS, 1, 1).expand(BATCH, HEADS, LENGTH, 1)
        weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    expected = (weights @ value.repeat_interleave(repeats, dim=1)).transpose(1, 2)
    # Some code computes the softmax in float32.
    if y.shape != expected.shape or not torch.allclose(y, expected, rtol=1e-5, atol=1e-5):
        return False
    if sinks is not None:
        module.sinks = arguments["s_aux"] = sinks.float()
    tensors = (x.float() for x in (query, key, value, mask))
    with torch.autocast(DEVICE.type, torch.bfloat16):
        _, in_autocast = function(module, *tensors, **arguments)
    # Under autocast flex_attention is given bfloat16. Code whose scores are float32 there, so that
    # its weights are exact, is left. It may return weights with or without the sinks.
    return not any(torch.allclose(in_autocast.double(), one, atol=1e-4) for one in (weights, exact))


KIND = "attention"

# Name in the configuration in place of "sdpa", and the start of those in place of "eager".
NAME = "liger"

EAGER_FUNCTION = "eager_attention_forward"

# The sizes of heads that flex_attention takes on a GPU.
HEAD_DIMS = range(LEAST_HEAD_DIM, FLASH_HEAD_DIM + 1)

SOFTCAP = "attn_logit_softcapping"
# Fields of a configuration; a model with one that is not 0 is left.
OBSTACLES = ("attention_dropout", "attn_dropout", "attn_pdrop", "attention_probs_dropout_prob")

# Code that compares the name of the implementation, or looks it up, would not know ours.
READS_NAME = re.compile(
    r"_attn_implementation\s*(==|!=|in\b|not in\b)|\[config\._attn_implementation\]"
)


class AttentionFacts(NamedTuple):
    """The facts about a model that its new class needs.

    Attributes:
        source: the Python module with the model's own attention code, or "" if it had "sdpa".
        adds: the addition of that code to softmax attention: "sinks", "softcap" or "".
        reads_positions: whether its forward can be copied to read position_ids.
        makes_positions: the inputs for which the model makes consecutive position_ids if it is
            given none.
    """

    source: str
    adds: str
    reads_positions: bool
    makes_positions: tuple[str, ...]

    @property
    def name(self) -> str:
        # Not the source itself: transformers takes a name with "flash" in it for flash attention.
        return f"{NAME}_{zlib.crc32(self.source.encode()):08x}" if self.source else NAME

    @property
    def original(self) -> str:
        return "eager" if self.source else "sdpa"


def plan(model: nn.Module) -> FusionPlan:
    """Plan the changes of the models in `model` that make causal masks."""
    return FusionPlan(KIND, model, _look)


def _look(plan: FusionPlan, name: str, module: nn.Module) -> None:
    cls: Any = classes.class_of(module)
    if KIND in classes.overrides(module) or not _makes_masks(cls):
        return
    if not is_pretrained(module):
        raise NotAnOp("it is not a PreTrainedModel")
    reads = takes_positions(cls.forward)
    inputs = makes_positions(module, cls.forward) if reads else ()
    facts = AttentionFacts(*_source(module), reads, inputs)
    options = {"implementation": facts.original, "adds": facts.adds}
    plan.fuse(name, module, KIND, options)
    plan.changes.append(functools.partial(_apply, module, facts))


def _apply(module: Any, facts: AttentionFacts) -> None:
    classes.override(module, KIND, facts)
    # The setter of `_attn_implementation` would change the configurations inside too.
    module.config._attn_implementation_internal = facts.name


@classes.kind(KIND)
def methods(base: Any, facts: AttentionFacts) -> dict[str, Callable[..., Any]]:
    documents, is_tracing = _register(facts)
    if not facts.reads_positions:
        return {}
    options = (facts.makes_positions, facts.name, documents, is_tracing)
    return {"forward": reading_positions(base.forward, *options)}


def _register(facts: AttentionFacts) -> tuple[Callable[..., Any], Callable[[Tensor], bool]]:
    """Write the attention and mask functions of a model into transformers' registries.

    Return the mask function of documents for it, and transformers' is_tracing.
    """
    from transformers import masking_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention: Any = sdpa_attention_forward
    mask: Any = masking_utils.sdpa_mask
    if facts.source:
        file = importlib.import_module(facts.source)
        attention = getattr(file, EAGER_FUNCTION)
        mask = masking_utils.eager_mask

    def current() -> Any:
        if facts.source:
            return getattr(file, EAGER_FUNCTION)
        return ALL_ATTENTION_FUNCTIONS["sdpa"]

    def current_mask() -> Any:
        return masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[facts.original]

    options: dict[str, Any] = {
        "causal_is_none": not facts.source, "gives_means": facts.adds == "softcap",
        "current": current_mask,
    }  # fmt: skip
    ALL_ATTENTION_FUNCTIONS.register(facts.name, attention_function(attention, facts.adds, current))
    masking_utils.AttentionMaskInterface.register(
        facts.name, mask_function(mask, masking_utils.is_tracing, **options)
    )
    has_cap = options["gives_means"]
    return documents_function(mask, current_mask, has_cap), masking_utils.is_tracing


def _source(module: Any) -> tuple[str, str]:
    """Return the Python module with the model's eager code ("" for SDPA), and what that code adds.

    Raises:
        NotAnOp: the model's attention is left.
    """
    cls: Any = classes.class_of(module)
    implementation = module.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise NotAnOp(f"its attention implementation is {implementation!r}")
    if implementation == "eager" and cls._supports_sdpa:
        raise NotAnOp("its attention implementation is 'eager', which is not its default")
    if not read(cls, "_supports_flex_attn"):
        raise NotAnOp("its class does not support flex_attention")
    if len({parameter.device for parameter in module.parameters()}) > 1:
        raise NotAnOp("its parameters are on several devices, and a block mask is on one")
    _check_code(cls)
    _check_config(module.config)
    functions = set(_functions(module, EAGER_FUNCTION))
    if not functions:
        raise NotAnOp("its layers do not call an attention function of transformers' registry")
    if implementation == "sdpa":
        if cap := getattr(module.config, SOFTCAP, None):
            raise NotAnOp(f"its configuration has {SOFTCAP}={cap}, which SDPA leaves out")
        return "", ""
    adds = addition(next(iter(functions))) if len(functions) == 1 else None
    if adds is None:
        raise NotAnOp(
            "its attention code is neither SDPA nor softmax attention with sinks or a soft cap"
        )
    return str(functions.pop().__module__), adds


def _check_code(cls: Any) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    file = sys.modules[cls.__module__]
    source = inspect.getsource(file)
    if "position_bias" in source:
        raise NotAnOp("its attention has position biases")
    if not cls._can_set_attn_implementation() or READS_NAME.search(source):
        raise NotAnOp("its code depends on the name of its attention implementation")
    registry = getattr(file, "ALL_ATTENTION_FUNCTIONS", None)
    if registry is not ALL_ATTENTION_FUNCTIONS or registry["sdpa"] is not sdpa_attention_forward:
        raise NotAnOp("its attention functions are not those of transformers")


def _check_config(config: Any) -> None:
    if read(config, "output_attentions"):
        raise NotAnOp("its configuration has output_attentions=True")
    for name in OBSTACLES:
        if getattr(config, name, None):
            raise NotAnOp(f"its configuration has {name}={getattr(config, name)}")
    # A configuration whose layers differ raises for what they do not share.
    layers = config.per_layer_config if config.is_heterogeneous else [config]
    sizes = [size for layer in layers for size in _head_sizes(layer)]
    if not all(sizes):
        raise NotAnOp("its configuration does not say how many numbers its heads have")
    if others := [size for size in sizes if size not in HEAD_DIMS]:
        raise NotAnOp(
            f"the heads of its attention have {others[0]} numbers, and those of flex_attention"
            f" {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
        )


def _head_sizes(config: Any) -> tuple[int, int]:
    """Return the size of a head of queries and keys, and of values; 0 if the configuration does not
    give it."""

    def number(name: str) -> int:
        return getattr(config, name, None) or 0

    # In multi-head latent attention, `head_dim` is the size of the rotated part alone.
    size = number("qk_nope_head_dim") and number("qk_nope_head_dim") + number("qk_rope_head_dim")
    size = size or number("head_dim")
    size = size or number("hidden_size") // max(number("num_attention_heads"), 1)
    return size, number("v_head_dim") or size


def _makes_masks(cls: Any) -> bool:
    code = _code(cls)
    return code is not None and not CAUSAL.isdisjoint(global_names(code))


def _functions(module: nn.Module, name: str) -> Iterator[Any]:
    """Yield the global functions called `name` to which forwards in a model refer."""
    for child in module.modules():
        cls: Any = classes.class_of(child)
        code = _code(cls)
        if code is not None and name in global_names(code):
            yield inspect.unwrap(cls.forward).__globals__[name]


def _code(cls: Any) -> Any:
    """Return the code of a class's forward, or None if it is not written in Python."""
    if issubclass(cls, torch.jit.ScriptModule):
        return None
    return getattr(inspect.unwrap(cls.forward), "__code__", None)


def is_pretrained(module: nn.Module) -> bool:
    # A model of transformers cannot exist before transformers is imported.
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def restore(model: nn.Module) -> None:
    """Write the names of the implementations that models had into their configurations."""
    module: Any
    for module in model.modules():
        facts = classes.overrides(module).get(KIND)
        if facts is not None and module.config._attn_implementation == facts.name:
            module.config._attn_implementation_internal = facts.original


@contextmanager
def names_kept_on_error(model: nn.Module) -> Iterator[None]:
    """Run the body, and restore the names of implementations in the configurations if it raises."""
    configs: list[Any] = [module.config for module in model.modules() if is_pretrained(module)]
    before = [(config, config._attn_implementation) for config in configs]
    try:
        yield
    except BaseException:
        for config, name in before:
            config._attn_implementation_internal = name
        raise
