"""The axes of every op's tensors, from which the sharding rules are derived.

One line names the axes of the arguments and of the results of an op, in the order of its results:

    x=* N, weight=N -> y=* N

* A lower-case axis may be sharded: the op treats its positions independently, or adds what is
  computed from each.
* An upper-case axis is computed as a whole, as the columns of a norm are.
* `*` is any number of leading axes that may be sharded, the rows, and `#` any number of others.

A tensor without an axis that is sharded is replicated if it is an argument. If it is a result or a
gradient, each device has its part of a sum. A line must be true in that sense: with a sharded axis,
a result that lacks the axis is the sum of what the devices compute.

An op whose axes depend on its options has a function of the call.

Three kinds of calls are computed otherwise, before DTensor asks for a rule: `columns` those whose
columns N are sharded, `vocab_parallel` losses whose words V are, and `means` means over
sharded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GATED = "gate=* n, up=* n -> y=* n"
# The columns of both halves, or pairs of neighbours, are in one tensor.
PACKED = "gate=* N, up=* N -> y=* N"
GRADIENTS = "dx=* D, dweight=V D, dbias=V, dlora_x=* R, dlora_b=V R"


def _gated(call: Any) -> str:
    return PACKED if call.up is None else GATED


def _rope(call: Any) -> str:
    q, k = (call.q, call.k) if hasattr(call, "q") else (call.dq, call.dk)
    # A single head of k would be replicated, and is no part of a sum.
    h = "H" if k.shape[1] == 1 != q.shape[1] else "h"
    # A spec of DTensor's stands for a tensor.
    matrix = "" if call.sin is not None or call.cos.tensor_meta.dtype.is_complex else " M M"
    leading = len(call.cos.shape) - len(matrix.split()) - bool(call.sections) - 2
    table = f"{'T ' if call.sections else ''}{'b ' * leading}s R{matrix}"
    heads = f"q=b {h} s D, k=b {h} s D"
    weights = ", q_weight=D, k_weight=D" if hasattr(call, "q_weight") else ""
    return f"{heads}, cos={table}, sin={table}{weights} -> {heads}"


def _tiled_mlp(call: Any) -> str:
    # Each device would add the bias to its part of the sum.
    i = "i" if call.down_bias is None else "I"
    return (
        f"x=* D, gate_weight={i} D, up_weight={i} D, down_weight=o {i}, gate_bias={i}, "
        f"up_bias={i}, down_bias=o -> y=* o"
    )


def _reduced(call: Any, num_items: Any = None) -> tuple[str, str]:
    """The axes of tokens, and of a loss for each token or of their sum.

    A mean is the sum of what the devices compute only if its divisor is given: `means` gives it.
    """
    if call.reduction == "none":
        return "*", "*"
    return ("*" if call.reduction == "sum" or num_items is not None else "#"), ""


def _cross_entropy(call: Any) -> str:
    rows, loss = _reduced(call, call.num_items_in_batch)
    return (
        f"logits={rows} V, target={rows}, weight=V, token_weight={rows}, num_items_in_batch= -> "
        f"loss={loss}, z_loss={loss}, lse={rows}, target_logit={rows}, total_weight=, "
        f"predicted_tokens={rows}, entropy={rows}, lse_error={rows}"
    )


def _linear_cross_entropy(call: Any) -> str:
    rows, loss = _reduced(call, call.num_items_in_batch)
    return (
        f"x={rows} D, weight=V D, target={rows}, bias=V, class_weight=V, token_weight={rows}, "
        f"num_items_in_batch=, lora_x={rows} R, lora_b=V R -> "
        f"loss={loss}, z_loss={loss}, lse={rows}, target_logit={rows}, total_weight=, "
        f"predicted_tokens={rows}, entropy={rows}, lse_error={rows}, {GRADIENTS.replace('*', rows)}"
    )


def _linear_divergence(call: Any) -> str:
    rows, loss = _reduced(call, call.num_items_in_batch)
    return (
        f"student_x={rows} D, student_weight=V D, teacher_x={rows} E, teacher_weight=W E, "
        f"student_bias=V, teacher_bias=W, teacher_logits={rows} W, target={rows}, "
        f"token_weight={rows}, num_items_in_batch=, student_lora_x={rows} R, student_lora_b=V R, "
        f"teacher_lora_x={rows} S, teacher_lora_b=W S -> "
        f"loss={loss}, divergence={loss}, cross_entropy={loss}, statistics=K {rows}, "
        f"{GRADIENTS.replace('*', rows)}, entropy={rows}"
    )


# Losses that are sums over the elements of two tensors, or over some of the rows.
TERMS = {
    name: f"{x}=* v, {y}=* v, shift_labels=* -> loss="
    for name, x, y in (("kl_div", "input", "target"), ("jsd", "input", "target"), ("tvd", "p", "q"))
}


def _distribution_loss(name: str) -> Callable[[Any], str]:
    def axes(call: Any) -> str:
        # The mean of jsd, and of the others, has a divisor that no device knows alone: `means`
        # computes it, and this is the rule where it does not.
        reduction = getattr(call, "reduction", "mean")
        if reduction == "none":
            return TERMS[name] + "* v"
        return (
            TERMS[name] if reduction == "sum" else TERMS[name].replace("*", "#").replace("v", "V")
        )

    return axes


AXES: dict[str, str | Callable[[Any], str]] = {
    "rms_norm": "x=* N, weight=N -> y=* N",
    "fused_add_rms_norm": "x=* N, residual=* N, weight=N -> y=* N, s=* N",
    "gated_rms_norm": "x=* N, gate=* N, weight=N -> y=* N",
    "layer_norm": "x=* N, weight=N, bias=N -> y=* N",
    "modulated_rms_norm": "x=* N, scale=* N, shift=* N, weight=N -> y=* N",
    "modulated_layer_norm": "x=* N, scale=* N, shift=* N, weight=N, bias=N -> y=* N",
    "group_norm": "x=n N #, weight=N, bias=N -> y=n N #",
    "mhc_coeffs": "x=* H C, phi=P Q, b=Q, alpha_pre=, alpha_post=, alpha_res= -> "
    "h_pre=* H, h_post=* H, h_res=* H H, product=* Q, rstd=*",
    "mhc_pre": "x=* H c, h_pre=* H -> y=* c",
    "mhc_post_res": "x=* H c, f_out=* c, h_post=* H, h_res=* H H -> y=* H c",
    "dyt": "x=* n, alpha=#, gamma=n, beta=n -> y=* n",
    "poly_norm": "x=* N, weight=P, bias=# -> y=* N",
    "swiglu": _gated,
    "clamped_swiglu": _gated,
    "geglu": _gated,
    "relu_squared": "x=* -> y=*",
    "softmax": "x=* N -> y=* N",
    "log_softmax": "x=* N -> y=* N",
    "sparsemax": "x=* N -> y=* N",
    "rope": _rope,
    "rms_norm_rope": _rope,
    "embedding": "weight=V d, indices=* -> y=* d",
    # A convolution over heads, queries and keys.
    "multi_token_attention": "scores=b C M N, weight=E D P Q, bias=E -> y=b E M N",
    "attn_res": "x=B * N, query=N, weight=N -> y=* N",
    "tiled_mlp": _tiled_mlp,
    "neighborhood_attention": "query=b h # D, key=b h # D, value=b h # D -> y=b h # D, lse=b h #",
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "divergence": "student_logits=* V, teacher_logits=* V, target=* -> "
    "divergence=*, student_share=*, student_lse=*, teacher_lse=*, "
    "student_lse_error=*, teacher_lse_error=*",
    **{name: _distribution_loss(name) for name in TERMS},
    "log_prob": "logits=* V, target=* -> log_prob=*, entropy=*, lse=*, mean_logits=*, "
    "log_sum_sq_probs=*, predicted_tokens=*, lse_error=*",
    "linear_log_prob": "x=* D, weight=V D, target=*, bias=V, lora_x=* R, lora_b=V R -> "
    "log_prob=*, entropy=*, lse=*, mean_logits=*, log_sum_sq_probs=*, predicted_tokens=*, "
    "lse_error=*",
    "linear_top_k_divergence": "x=* D, weight=V D, teacher_ids=* K, bias=V, lora_x=* R, "
    "lora_b=V R -> logits=* K, rest=*, rest_error=*",
    "linear_divergence": _linear_divergence,
}

# Ops whose columns N may be sharded too: a device computes its own with their definition, and
# statistics of rows are summed over the devices.
SHARDED_COLUMNS = (
    "rms_norm", "fused_add_rms_norm", "gated_rms_norm", "layer_norm", "modulated_rms_norm",
    "modulated_layer_norm", "poly_norm", "softmax", "log_softmax", "attn_res",
)  # fmt: skip
# Ops of groups of columns: a device that has whole groups computes them by itself.
GROUPED_COLUMNS = ("gated_rms_norm", "group_norm")
# Ops of a gate and an up, which may be packed in one tensor: so does a device that has both of its
# columns.
GATED_COLUMNS = tuple(name for name, axes in AXES.items() if axes is _gated)
