"""Compile every cuda kernel, as its host code launches it, for GPUs that need not be present.

    TRITON_INTERPRET=0 python tests/support/compile_for_gpus.py [TARGET ...] [--heaviest TARGET ...]

prints a JSON record per compiled launch: kernel, target, options, registers per thread, and bytes
spilled per thread.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import liger_ops.lowering.cuda as cuda
from liger_ops import library
from liger_ops.lowering.common.losses.cross_entropy import Tokens
from liger_ops.lowering.cuda.attention import multi_token_attention
from liger_ops.lowering.cuda.launch import WARP_SIZE
from liger_ops.lowering.cuda.losses import cross_entropy

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}

# Flag that host code sets if the GPU supports a feature -> least compute capability.
CAPABILITY = {"KNOWN": 0, "PREFETCH": 80, "DEPENDENT": 90}

# Launch options for the compiler, beside num_warps.
COMPILER_OPTIONS = ("debug", "sanitize_overflow")

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def record_launches() -> list[Launch]:
    """Replace `launch` in every module of lowering.cuda by a function that appends to the returned
    list."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: Any, x: Any, *args: Any, **options: Any) -> None:
        launches.append((kernel, args, options))

    for module in pkgutil.walk_packages(cuda.__path__, f"{cuda.__name__}."):
        loaded = importlib.import_module(module.name)
        if hasattr(loaded, "launch"):
            loaded.launch = record
    return launches


def calls() -> Iterator[Callable[[], Any]]:
    """Every op at the sizes and options that affect the compiled code."""
    kernel = {name: op.kernels["cuda"] for name, op in library.OPS.items()}
    yes, both = [True] * 3, [True] * 2
    for dtype in (torch.float32, torch.bfloat16):
        for N in (100, 4096, 16384, 32768, 65536, 131072):
            x, row = torch.empty(4, N, dtype=dtype), torch.empty(N, dtype=dtype)
            for mode in ("llama", "none") if N == 4096 else ("llama",):
                yield lambda x=x, row=row, mode=mode: kernel["rms_norm"](x, row, 1e-6, 0.0, mode)
            yield lambda x=x, row=row: kernel["fused_add_rms_norm"](x, x, row)
            if N in (4096, 32768):
                yield from modulated_calls(kernel, x, row)
            for first in (True, False):
                args, options = (x, x, row), (1e-6, first, None, "silu")
                yield lambda args=args, options=options: kernel["gated_rms_norm"](*args, *options)
                yield lambda args=args, options=options: kernel["gated_rms_norm_backward"](
                    args[0], *args, *options, yes
                )
            yield lambda x=x, row=row: kernel["poly_norm"](x, row[:3], row[:1])
            yield lambda x=x, row=row: kernel["poly_norm_backward"](
                x, x, row[:3], row[:1], 1e-6, yes
            )
            yield lambda x=x, row=row: kernel["layer_norm"](x, row, row)
            yield lambda x=x, row=row: kernel["rms_norm_backward"](x, x, row, 1e-6, 0.0, both)
            yield lambda x=x, row=row: kernel["fused_add_rms_norm_backward"](
                x, x, x, row, 1e-6, 0.0, both
            )
            yield lambda x=x, row=row: kernel["layer_norm_backward"](x, x, row, row, 1e-5, yes)
            rows, words = torch.empty(40, N, dtype=dtype), torch.zeros(40, dtype=torch.int64)
            yield lambda given=(rows, words, 9, None): kernel["embedding_backward"](*given)
        for N in (100, 4096, 8192, 16384):
            x, row = torch.empty(3, 4, N, dtype=dtype), torch.empty(N, dtype=dtype)
            yield lambda x=x, row=row: kernel["attn_res"](x, row, row)
            yield lambda x=x, row=row: kernel["attn_res_backward"](x[0], x, row, row, 1e-6, yes)
        for N in (100, 4096):
            x, row = torch.empty(4, N, dtype=dtype), torch.empty(N, dtype=dtype)
            args = (x, torch.empty(1, dtype=dtype), row, row)
            yield lambda args=args: kernel["dyt"](*args)
            yield lambda args=args: kernel["dyt_backward"](args[0], *args, [True] * 4)
            yield from activation_calls(kernel, torch.empty(4, N, dtype=dtype))
        for N in (100, 4096, 32768, 65536):
            x = torch.empty(4, N, dtype=dtype)
            for op in ("softmax", "log_softmax"):
                yield lambda x=x, op=op: kernel[op](x)
                yield lambda x=x, op=op: kernel[f"{op}_backward"](x, x)
            yield lambda x=x: kernel["sparsemax_forward"](x)
            yield lambda x=x: kernel["sparsemax_backward"](x, x)
            for sparse in (False, True):
                yield partial(multi_token_attention.launch_forward, x, x, sparse)
                yield partial(multi_token_attention.launch_backward, x, x, x, sparse)
        yield from multi_token_calls(kernel, dtype)
        for V in (100, 4096, 32768, 128256):
            yield from cross_entropy_calls(kernel, torch.empty(4, V, dtype=dtype))
        yield from distribution_loss_calls(kernel, torch.empty(4, 128256, dtype=dtype))
        yield partial(finish_gradients, kernel, torch.empty(4, 64, dtype=dtype))
        yield partial(gradients_by_words, kernel, torch.empty(4, 64, dtype=dtype))
        yield partial(listed_words, kernel, torch.empty(4, 64, dtype=dtype))
        # A whole row of each head, and two passes.
        for V in (100, 9000):
            yield partial(both_heads, kernel, torch.empty(4, 64, dtype=dtype), V)
        for D, R in ((128, 128), (96, 24), (256, 256)):
            q, k = torch.empty(2, 3, 32, D, dtype=dtype), torch.empty(2, 3, 8, D, dtype=dtype)
            table = torch.empty(2, 3, R, dtype=dtype)
            q, k = q.transpose(1, 2), k.transpose(1, 2)
            for interleaved in (False, True):
                args = (q, k, table, table, interleaved, False, None, False)
                yield lambda args=args: kernel["rope"](*args)
                yield lambda args=args: kernel["rope_backward"](*args, both)
            row, halves = torch.empty(D, dtype=dtype), (False, False, None, False)
            for mode in ("llama", "none"):
                norm = (row, row, 1e-6, 0.0)
                yield partial(kernel["rms_norm_rope"], q, k, table, table, *norm, mode, *halves)
            for options, four in ((halves, [True] * 4), ((True, *halves[1:]), [True] * 4)):
                given = (q, k, q, k, table, table, *norm, *options, four)
                yield partial(kernel["rms_norm_rope_backward"], *given)
            pairs = table[..., : R // 2]
            three = torch.stack((table, table, table))
            for args in (
                (q, k, pairs, pairs, False, True, None, False),
                (q, k, torch.complex(pairs.float(), pairs.float()), None, True, True, None, False),
                (q, k, three, three, False, False, [R // 2 - 8, 8, 0], False),
                (q, k, torch.empty(2, 3, R // 2, 2, 2), None, False, False, None, False),
                (q, k, pairs, pairs, True, True, None, True),
            ):
                yield lambda args=args: kernel["rope"](*args)
                yield lambda args=args: kernel["rope_backward"](*args, both)
        yield from hyper_connection_calls(kernel, dtype)
        yield from window_calls(kernel, dtype)
        for shape, groups in (
            ((2, 64, 8, 8), 32),
            ((2, 320, 64, 64), 32),
            ((1, 512, 64, 64), 32),
            ((1, 256, 128, 128), 32),
            ((1, 64, 512, 512), 32),
        ):
            x, row = torch.empty(shape, dtype=dtype), torch.empty(shape[1], dtype=dtype)
            yield lambda x=x, row=row, groups=groups: kernel["group_norm"](x, groups, row, row)
            yield lambda x=x, row=row, groups=groups: kernel["group_norm_backward"](
                x, x, groups, row, row, 1e-5, yes
            )


def multi_token_calls(kernel: Any, dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    for C, groups in ((16, 1), (32, 1), (128, 2)):
        scores = torch.empty(1, C, 16, 16, dtype=dtype)
        weight = torch.empty(C, C // groups, 3, 3, dtype=dtype)
        args = (scores, weight, weight[:, 0, 0, 0].contiguous(), [1], [1], [1], groups, False)
        yield partial(kernel["multi_token_attention_forward"], *args)
        yield partial(kernel["multi_token_attention_backward"], scores, *args, [True] * 3)


def hyper_connection_calls(
    kernel: dict[str, Any], dtype: torch.dtype
) -> Iterator[Callable[[], Any]]:
    for hc, C in ((4, 4096), (64, 64)):
        x, f_out = torch.empty(4, hc, C, dtype=dtype), torch.empty(4, C, dtype=dtype)
        h, h_res = torch.empty(4, hc), torch.empty(4, hc, hc)
        columns = hc * hc + 2 * hc
        mix = (x, torch.empty(hc * C, columns), torch.empty(columns), *[torch.ones(())] * 3)
        saved = (torch.empty(4, columns), torch.empty(4), 20, 1e-6, 1e-6, 2.0, [True] * 6)
        yield partial(kernel["mhc_pre"], x, h)
        yield partial(kernel["mhc_pre_backward"], f_out, x, h, [True] * 2)
        yield partial(kernel["mhc_post_res"], x, f_out, h, h_res)
        yield partial(kernel["mhc_post_res_backward"], x, x, f_out, h, h_res, [True] * 4)
        yield partial(kernel["mhc_coeffs_forward"], *mix)
        yield partial(kernel["mhc_coeffs_backward"], h, h, h_res, *mix, *saved)


def modulated_calls(kernel: Any, x: Any, row: Any) -> Iterator[Callable[[], Any]]:
    """A row of scale and shift for each sample, and for each row of x; and a scale alone."""
    for scale in (x[:2], x):
        for op, weights, options in (
            ("modulated_rms_norm", (row,), (1e-6, 0.0)),
            ("modulated_layer_norm", (row, row), (1e-6,)),
        ):
            args = (x, scale, scale, *weights)
            yield partial(kernel[op], *args)
            yield partial(kernel[op], x, scale)
            mask = [True] * len(args)
            yield partial(kernel[f"{op}_backward"], x, *args, *options, mask)


def window_calls(
    kernel: dict[str, Callable[..., Any]], dtype: torch.dtype
) -> Iterator[Callable[[], Any]]:
    """neighborhood_attention, in one and two dimensions."""
    for shape, options in (
        ((1, 4, 512, 64), ([129], [1], [False], "clipped", None)),
        ((1, 4, 512, 256), ([129], [1], [False], "shifted", None)),
        ((1, 4, 32, 32, 80), ([7, 7], [1, 1], [False, True], "shifted", None)),
    ):
        query, lse = torch.empty(shape, dtype=dtype), torch.empty(shape[:-1])
        key = torch.empty((1, 2, *shape[2:]), dtype=dtype)
        args, back = (query, key, key, *options), (query, lse, query, key, key, query, lse)
        yield lambda args=args: kernel["neighborhood_attention_forward"](*args)
        yield lambda args=(*back, *options): kernel["neighborhood_attention_backward"](
            *args, [True] * 3
        )


def activation_calls(
    kernel: dict[str, Callable[..., Any]], gate: torch.Tensor
) -> Iterator[Callable[[], Any]]:
    """Every activation, of separate and of packed tensors, with one row and several."""
    packed = torch.cat((gate, gate), -1)
    forms = (
        ("swiglu", (1.0, 1.0)),
        ("geglu", ("tanh",)),
        ("geglu", ("none",)),
        ("clamped_swiglu", (1.702, 7.0, 1.0, False)),
        ("clamped_swiglu", (1.702, 7.0, 1.0, True)),
    )
    for name, options in forms:
        pairs = [(packed, None)] if options[-1] is True else [(packed, None), (gate, gate)]
        for first, up in pairs:
            mask = [True, up is not None]
            yield lambda n=name, f=first, u=up, o=options: kernel[n](f, u, *o)
            yield lambda n=name, f=first, u=up, o=options, m=mask: kernel[f"{n}_backward"](
                gate, f, u, *o, m
            )
    for name, op in library.OPS.items():
        if op.like:
            tensors = [gate] * len(op.schema.arguments)
            yield lambda n=name, given=tensors: kernel[n](*given)


def cross_entropy_calls(
    kernel: dict[str, Callable[..., Any]], logits: torch.Tensor
) -> Iterator[Callable[[], Any]]:
    """The plain loss, and all options at once; the gradient overwrites the logits. And log_prob,
    which launches the same kernels, and divergence."""
    M, V = logits.shape
    target, row = torch.zeros(M, dtype=torch.int64), torch.zeros(M)
    weight, items, one = torch.ones(V), torch.tensor(M), torch.tensor(1.0)
    plain = (logits, target, None, None, None, -100, "mean", 0.0, 0.0, None, 1.0)
    full = (logits, target, weight, row, items, -100, "mean", 0.1, 1e-4, 30.0, 0.5)
    yield lambda: kernel["cross_entropy_forward"](*plain)
    yield lambda: kernel["cross_entropy_forward"](*full, True, True)
    for options in ((0.7, None, 1.0, -100), (0.7, 30.0, 0.5, -100)):
        asked = [options[1] is not None] * 3
        yield lambda given=(*options, *asked): kernel["log_prob_forward"](logits, target, *given)
        inputs = (row, row, None, logits, target, row, row, row, *options)
        yield lambda inputs=inputs: kernel["log_prob_backward"](*inputs)
    # A whole row, and two passes; all widths and kinds would take a minute.
    if V in (100, 128256):
        for kind in ("jsd", "cosine"):
            given = (logits, logits, target)
            options = (kind, 0.5, 0.7, None, -100)
            yield partial(kernel["divergence_forward"], *given, *options)
            if kind == "jsd":
                yield partial(kernel["divergence_forward"], *given, *options, row, row, row, row)
            inputs = (row, *given, *[row] * 6, *options)
            yield partial(kernel["divergence_backward"], *inputs, [True, True])
    for args, grads in ((plain, (one, None, None, None)), (full, (one, one, row, row))):
        inputs = (*args[:5], row, row, one, *args[5:])
        yield lambda grads=grads, inputs=inputs: kernel["cross_entropy_backward"](*grads, *inputs)
        yield lambda args=args: cross_entropy.loss_and_gradient(
            library.OPS["cross_entropy_forward"].arguments(*args),
            args[0],
            Tokens(args[2], args[1], args[3], row, row, row, row, lse_error=row),
            gradient=True,
        )


def distribution_loss_calls(
    kernel: dict[str, Callable[..., Any]], x: torch.Tensor
) -> Iterator[Callable[[], Any]]:
    """Every kind, and the losses of elements; and several rows in a tile."""
    one, labels = torch.tensor(1.0), torch.zeros(len(x), dtype=torch.int64)
    for op, args in (
        ("kl_div", (x, x, "batchmean", False, 1e-10)),
        ("kl_div", (x, x, "none", True, 1e-10)),
        ("jsd", (x, x, labels, 0.5, -100)),
        ("jsd", (x, x, None, 1.0, -100)),
        ("tvd", (x, x, labels, "mean", -100)),
        ("jsd", (x[:, :100], x[:, :100], labels, 0.5, -100)),
    ):
        dloss = x.float() if "none" in args else one
        yield lambda op=op, args=args: kernel[op](*args)
        yield lambda op=op, args=(dloss, *args, [True, True]): kernel[f"{op}_backward"](*args)


def finish_gradients(kernel: dict[str, Callable[..., Any]], x: torch.Tensor) -> None:
    """Call linear_cross_entropy's backward with the results of its forward."""
    one, lse = torch.tensor(1.0), torch.zeros(4)
    target = torch.zeros(4, dtype=torch.int64)
    inputs = (one, None, None, None, x, x, target, None, None, None, None, lse, lse, one)
    options = (-100, "mean", 0.0, 0.0, None, 1.0, None, None)
    kernel["linear_cross_entropy_backward"](
        *inputs, x, x, None, *options, [True, True, False, False, False]
    )


def gradients_by_words(kernel: dict[str, Callable[..., Any]], x: torch.Tensor) -> None:
    """Call linear_log_prob's backward, whose targets need not be among the columns."""
    row, target = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    options = (0.7, None, 1.0, -100, None, None, [True, True, False, False, False])
    kernel["linear_log_prob_backward"](row, row, None, x, x, target, None, row, row, row, *options)


def listed_words(kernel: dict[str, Callable[..., Any]], x: torch.Tensor) -> None:
    """Call linear_top_k_divergence, which has a gradient of lse alone."""
    ids = torch.tensor([[0, 1]]).expand(4, 2)
    options = (0.7, None, 1.0, None, None)
    logits, rest, error = kernel["linear_top_k_divergence_forward"](x, x, ids, None, *options)
    mask = [True, True, False, False, False]
    kernel["linear_top_k_divergence_backward"](
        logits, rest, x, x, ids, None, logits, rest, error, *options, mask
    )


def both_heads(kernel: dict[str, Callable[..., Any]], x: torch.Tensor, V: int) -> None:
    """Call linear_divergence with caps, the cross-entropy of labels, and another length."""
    weight, logits = x.new_empty(V, 64), x.new_empty(4, V + 32)
    target = torch.zeros(4, dtype=torch.int64)
    teacher = (None, None, None, None, logits, target, None, None)
    options = ("jsd", 0.5, 0.7, None, 30.0, 20.0, 0.5, 1.0, 0.5, 0.5)
    mask = [True, True, False, False, False]
    kernel["linear_divergence_forward"](x, weight, *teacher, *options, gradient_mask=mask)


def specialised(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> ASTSource:
    """The source that launching the kernel with these arguments would compile."""
    signature, constants, attributes = {}, {}, {}
    passed = dict(zip(kernel.arg_names, args, strict=False)) | options
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", passed[name]
            continue
        value = passed[name]
        integer = isinstance(value, int) and not parameter.do_not_specialize
        if value is None or (integer and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (integer and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def constants_of(target: GPUTarget, options: dict[str, Any]) -> dict[str, bool]:
    """The flags that depend on the GPU; host code here assumes a GPU without any feature."""
    cuda = target.backend == "cuda"
    return {
        name: cuda and target.arch >= least for name, least in CAPABILITY.items() if name in options
    }


def resources(compiled: Any, target: GPUTarget) -> dict[str, int]:
    """Registers and spilled bytes per thread, as the assembler reports them."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers, spilled = (
            int(re.search(rf"\.{key}:\s+(\d+)", text).group(1))
            for key in ("vgpr_count", "vgpr_spill_count")
        )
        return {"registers": registers, "spilled_bytes": 4 * spilled}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        report = subprocess.run(
            [tool, "-res-usage", path], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (
        int(re.search(rf"{key}:(\d+)", report).group(1)) for key in ("REG", "STACK")
    )
    return {"registers": registers, "spilled_bytes": stack}


def compiled(
    kernel: Any, args: tuple[Any, ...], launched: dict[str, Any], target: str
) -> dict[str, Any]:
    """The record of a launch, compiled for a target."""
    options = {**launched, **constants_of(TARGETS[target], launched)}
    source = specialised(kernel, args, options)
    compiler = {"num_warps": warps(launched, target)}
    compiler |= {key: options[key] for key in COMPILER_OPTIONS if key in options}
    result = triton.compile(source, target=TARGETS[target], options=compiler)
    return {
        "kernel": kernel.__name__,
        "target": target,
        "options": {key: str(value) for key, value in options.items()},
        **resources(result, TARGETS[target]),
    }


def warps(launched: dict[str, Any], target: str) -> int:
    return max(1, launched.get("num_warps", 4) * WARP_SIZE // TARGETS[target].warp_size)


def distinct(launches: list[Launch], target: str) -> Iterator[Launch]:
    """One launch for each code that a target's compiler is given."""
    seen = set()
    for kernel, args, launched in launches:
        options = {**launched, **constants_of(TARGETS[target], launched)}
        key = (specialised(kernel, args, options).hash(), warps(launched, target))
        if key not in seen:
            seen.add(key)
            yield kernel, args, launched


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help="compile every launch")
    parser.add_argument(
        "--heaviest",
        nargs="*",
        default=[],
        help="compile the launches of each kernel and dtype that need most registers on the first",
    )
    options = parser.parse_args(arguments)
    launches = record_launches()
    for call in calls():
        call()
    heaviest: dict[Any, tuple[int, Launch]] = {}
    for target in options.targets:
        for launch in distinct(launches, target):
            record = compiled(*launch, target)
            print(json.dumps(record), flush=True)
            dtype = next(arg.dtype for arg in launch[1] if isinstance(arg, torch.Tensor))
            key = (record["kernel"], dtype)
            if target == options.targets[0] and record["registers"] > heaviest.get(key, (-1,))[0]:
                heaviest[key] = (record["registers"], launch)
    for target in options.heaviest:
        for _, launch in heaviest.values():
            print(json.dumps(compiled(*launch, target)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
