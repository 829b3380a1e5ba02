"""Models that make consecutive position_ids where they are given none.

transformers looks at position_ids to find packed documents. In a trace it cannot look, and adds a
mask of documents in any case. A model that makes its own position_ids has no packed documents,
which its code shows.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from ..layers.rebinding import is_wrapped_plainly, rebound

# The code of models, in the form that ast.unparse gives it; transformers 5.24 renames the cache.
CONSECUTIVE = {
    f"""\
if position_ids is None:
    past_seen_tokens = {cache}.get_seq_length() if {cache} is not None else 0
    position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + \
past_seen_tokens
    position_ids = position_ids.unsqueeze(0)"""
    for cache in ("past_key_values", "cache")
}

# Functions of transformers.masking_utils for which a causal mask may be skipped by default.
CAUSAL = {
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
}


@functools.cache
def makes_positions(forward: Any) -> bool:
    """Whether a forward's masks are of one document if it is given no position_ids, and
    `of_own_positions` can tell it so."""
    if not is_wrapped_plainly(forward):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return False
    made = [node for node in ast.walk(tree) if isinstance(node, ast.If) and _is_default(node)]
    if len(made) != 1:
        return False
    inside = set(ast.walk(made[0]))
    assigned = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id in ("position_ids", "past_seen_tokens")
        if not isinstance(node.ctx, ast.Load) and node not in inside
    ]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    masks = {name for name in names if "mask" in name and name.startswith("create_")}
    keywords = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    return not assigned and masks <= CAUSAL and "allow_is_causal_skip" not in keywords


def _is_default(node: ast.If) -> bool:
    return ast.unparse(node) in CONSECUTIVE


def of_own_positions(forward: Any) -> Callable[..., Any]:
    """A forward that, given no position_ids, makes its masks without looking at its own."""
    parameters = list(inspect.signature(forward).parameters)
    place = parameters.index("position_ids")
    consecutive = rebound(forward, dict.fromkeys(CAUSAL, _without_positions))

    @functools.wraps(forward)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if place < len(args) else kwargs.get("position_ids")
        return (consecutive if given is None else forward)(*args, **kwargs)

    return chosen


def _without_positions(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    place = list(inspect.signature(make_mask).parameters).index("position_ids")

    @functools.wraps(make_mask)
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("position_ids", None)
        if len(args) > place:
            args = (*args[:place], None, *args[place + 1 :])
        return make_mask(*args, **kwargs)

    return make
