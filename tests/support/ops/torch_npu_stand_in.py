"""Stand-ins for npu_grouped_matmul and npu_fusion_attention where torch_npu is not installed. They
check the arguments by the documentation of torch_npu for Atlas A2 and A3, and compute in float32 on
the CPU.

The documentation is Ascend/op-plugin, docs/zh/custom_APIs/torch_npu/, for two operators:

* torch_npu-npu_grouped_matmul.md, for products that are not quantised, with `group_list` a tensor
  and one tensor of x, weight and y.
* torch_npu-npu_fusion_attention.md, for the layout TND, without pse, dropout and prefixes. What the
  document has no words for follows op_plugin/ops/opapi/FlashAttentionKernelNpuOpApi.cpp there: the
  statistics of the softmax are (T, H, 8).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import simulated_npu
from simulated_npu import to_cpu, to_npu

SCHEMA = (
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor?"
    " group_list=None, int? split_item=0, int? group_type=None, int? group_list_type=0) -> Tensor[]"
)
BIAS = {
    torch.float16: torch.float16, torch.bfloat16: torch.float32, torch.float32: torch.float32
}  # fmt: skip
MOST_GROUPS, INNER_LIMIT = 1024, 65536


def allocated(
    x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None, group_list: Tensor | None,
    split_item: int, group_type: int | None, group_list_type: int,
) -> Tensor:  # fmt: skip
    """Check the arguments without their values, and allocate the result."""
    (a,), (b,) = x, weight
    assert split_item in (2, 3) and group_list_type in (0, 1)
    assert group_list is not None and group_list.dtype is torch.int64 and group_list.dim() == 1
    groups = len(group_list)
    assert 0 < groups <= MOST_GROUPS and group_list.is_contiguous()
    assert a.dtype is b.dtype and a.dtype in BIAS and a.dim() == 2
    assert a.numel() and b.numel(), "empty tensors"
    assert max(a.shape[-1] if group_type == 0 else a.shape[0], *b.stride()[-2:]) < INNER_LIMIT
    if group_type == 2:
        assert a.t().is_contiguous(), "x must be transposed"
        assert b.dim() == 2 and b.is_contiguous(), "weight must not be transposed"
        assert bias is None and a.shape[1] == b.shape[0]
        return a.new_empty(groups, a.shape[0], b.shape[1])
    assert group_type == 0 and a.is_contiguous(), "x must not be transposed"
    assert b.dim() == 3 and b.shape[:2] == (groups, a.shape[1])
    assert b.is_contiguous() or b.mT.is_contiguous(), "weight may be transposed"
    for tensor in bias or ():
        assert tensor.dtype is BIAS[a.dtype] and tensor.shape == (groups, b.shape[2])
        assert tensor.is_contiguous()
    return a.new_empty(len(a), b.shape[2])


def grouped_matmul(
    x: list[Tensor], weight: list[Tensor], *, bias: list[Tensor] | None = None,
    group_list: Tensor | None = None, split_item: int = 0, group_type: int | None = None,
    group_list_type: int = 0,
) -> list[Tensor]:  # fmt: skip
    """Compute the product of each group in float32."""
    y = allocated(x, weight, bias, group_list, split_item, group_type, group_list_type)
    if group_list.is_meta:
        return [y]
    ends = group_list.cumsum(0) if group_list_type else group_list
    ends = [0, *ends.tolist()]
    (a,), (b,) = x, weight
    assert ends == sorted(ends) and ends[-1] <= a.shape[0 if group_type == 0 else 1]
    for e, (start, end) in enumerate(pairwise(ends)):
        if group_type == 2:
            y[e] = a[:, start:end].float() @ b[start:end].float()
        else:
            product = a[start:end].float() @ b[e].float()
            y[start:end] = product if bias is None else product + bias[0][e]
    return [y]


def on_simulated_npu(*args: Any, **kwargs: Any) -> list[Tensor]:
    """Compute the same on the simulated device, which has no transposed tensors."""
    (x, weight), options = pytree.tree_map(to_cpu, (args, kwargs))
    if options["group_type"] == 2:
        x = [x[0].t().contiguous().t()]
    return [to_npu(y) for y in grouped_matmul(x, weight, **options)]


# The arguments that both operators of attention have by name.
COMMON = (
    " float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647,"
    " int inner_precise=0,{} int[]? prefix=None, int[]? actual_seq_qlen=None,"
    " int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True,"
    ' bool sync=False, str softmax_layout="", Tensor? sink=None'
)
ATTENTION_SCHEMA = (
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout,"
    " Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1.,"
    f"{COMMON.format('')}) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
)
GRADIENT_SCHEMA = (
    "npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num,"
    " str input_layout, *, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None,"
    " Tensor? softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None,"
    " Tensor? attention_in=None, float scale_value=1.,"
    f"{COMMON.format(' int seed=0, int offset=0, int numels=0,')})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
MOST_TOKENS, MOST_DOCUMENTS, MOST_HEADS, MOST_COLUMNS = 2**20, 1024, 256, 768
# Times that a number of the softmax's statistics is repeated.
REPEATED = 8


class FusionAttention:
    """A checked call of attention, or of its gradient: the scores of each document."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str,
        scale: float, atten_mask: Tensor | None = None, pre_tockens: int = 2147483647,
        next_tockens: int = 2147483647, actual_seq_qlen: list[int] | None = None,
        actual_seq_kvlen: list[int] | None = None, sparse_mode: int = 0, softmax_layout: str = "",
    ) -> None:  # fmt: skip
        (T, H, D), (key_tokens, key_heads, _) = query.shape, key.shape
        assert input_layout == "TND" and head_num == H <= MOST_HEADS and H % key_heads == 0
        assert key.shape == value.shape == (key_tokens, key_heads, D)
        assert 1 <= T <= MOST_TOKENS and 1 <= key_tokens <= MOST_TOKENS and 1 <= D <= MOST_COLUMNS
        assert query.dtype is key.dtype is value.dtype
        assert query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        assert all(x.is_contiguous() for x in (query, key, value))
        # By default, each document's statistics are (H, length, 8).
        assert softmax_layout == "TND", "of another order"
        self.ends = []
        for ends, tokens in ((actual_seq_qlen, T), (actual_seq_kvlen, key_tokens)):
            assert type(ends) is list and all(type(end) is int for end in ends), "on the host"
            assert 1 <= len(ends) <= MOST_DOCUMENTS and ends == sorted(ends) and ends[-1] == tokens
            self.ends.append([0, *ends])
        assert len(self.ends[0]) == len(self.ends[1]), "as many documents of queries as of keys"
        self.mode, self.left, self.right = sparse_mode, None, None
        if atten_mask is None:
            assert sparse_mode == 0 and pre_tockens == next_tockens == 2147483647, "no effect"
        else:
            hidden = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
            assert torch.equal(atten_mask, hidden), "the mask of sparse_mode 2, 3 and 4"
            assert sparse_mode in (2, 3, 4)
            self.right = 0
        if sparse_mode == 4:
            assert min(pre_tockens, next_tockens) >= 0, "a band without the query's own place"
            self.left, self.right = pre_tockens, next_tockens
        else:
            assert pre_tockens == next_tockens == 2147483647, "no effect"
        self.scale, self.group = scale, H // key_heads
        self.query, self.key, self.value = (x.float() for x in (query, key, value))

    def hidden(self, queries: int, keys: int) -> Tensor:
        """Return which keys of a document each query does not see."""
        ahead = torch.arange(keys) - torch.arange(queries)[:, None]
        if self.mode in (3, 4):
            # The last query is in the place of the last key.
            ahead = ahead - (keys - queries)
        hidden = torch.zeros(queries, keys, dtype=torch.bool)
        if self.right is not None:
            hidden |= ahead > self.right
        if self.left is not None:
            hidden |= ahead < -self.left
        assert not hidden.all(-1).any(), "a row of the mask is hidden whole"
        return hidden

    def documents(self) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor, Tensor]]:
        """Yield each document's queries and keys, as tokens, and its query, key, value and scores,
        (H, length, ...)."""
        for of_queries, of_keys in zip(*map(pairwise, self.ends), strict=True):
            queries, keys = slice(*of_queries), slice(*of_keys)
            if queries.start == queries.stop:
                continue
            q, k, v = (
                x[tokens].transpose(0, 1)
                for x, tokens in ((self.query, queries), (self.key, keys), (self.value, keys))
            )
            k, v = (x.repeat_interleave(self.group, 0) for x in (k, v))
            hidden = self.hidden(q.shape[1], k.shape[1])
            scores = (q @ k.mT * self.scale).masked_fill(hidden, -float("inf"))
            yield queries, keys, q, k, v, scores


def fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *,
    scale: float = 1.0, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute attention of each document, and the largest score and the sum of each softmax."""
    attention = FusionAttention(query, key, value, head_num, input_layout, scale, **options)
    y = torch.empty_like(query)
    largest, total = (query.new_empty(*query.shape[:2], dtype=torch.float32) for _ in range(2))
    for queries, _, _, _, v, scores in attention.documents():
        top = scores.amax(-1, keepdim=True)
        p = (scores - top).exp()
        largest[queries], total[queries] = top.squeeze(-1).t(), p.sum(-1).t()
        # The product's operand is rounded, as are the products of a cube core.
        mixed = p.to(query.dtype).float() @ v / p.sum(-1, keepdim=True)
        y[queries] = mixed.transpose(0, 1).to(y.dtype)
    statistics = (x.unsqueeze(-1).repeat(1, 1, REPEATED) for x in (largest, total))
    return y, *statistics, query.new_empty(0), 0, 0, 0


def fusion_attention_gradient(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
    softmax_max: Tensor, softmax_sum: Tensor, attention_in: Tensor, scale_value: float = 1.0,
    **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the gradients of attention from its result and the softmax's statistics."""
    attention = FusionAttention(query, key, value, head_num, input_layout, scale_value, **options)
    for x in (softmax_max, softmax_sum):
        assert x.dtype is torch.float32 and x.shape == (*query.shape[:2], REPEATED)
        assert x.is_contiguous() and torch.equal(x, x[..., :1].expand_as(x))
    for x in (attention_in, dy):
        assert x.dtype is query.dtype and x.shape == query.shape and x.is_contiguous()
    gradients = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
    delta = (dy.float() * attention_in.float()).sum(-1)
    for queries, keys, q, k, v, scores in attention.documents():
        largest, total = (x[queries, :, :1].transpose(0, 1) for x in (softmax_max, softmax_sum))
        p = (scores - largest).exp() / total
        upstream = dy[queries].transpose(0, 1).float()
        ds = p * (upstream @ v.mT - delta[queries].t().unsqueeze(-1)) * attention.scale
        p, ds = (x.to(query.dtype).float() for x in (p, ds))
        parts = zip(
            gradients, (queries, keys, keys), (ds @ k, ds.mT @ q, p.mT @ upstream), strict=True
        )
        for gradient, tokens, of_heads in parts:
            shared = of_heads.unflatten(0, (gradient.shape[1], -1)).sum(1)
            gradient[tokens] = shared.transpose(0, 1)
    empty = query.new_empty(0)
    return *(x.to(query.dtype) for x in gradients), empty, empty


def by_name(operator: str, function: Any) -> Any:
    """Return a function of the operator's arguments, in any form, that calls `function` with those
    that do not have their default, by name."""

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = getattr(torch.ops.npu, operator).default._schema.arguments
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
        return function(
            **{
                name: value
                for name, value in given.items()
                if isinstance(value, Tensor) or name not in defaults or value != defaults[name]
            }
        )

    return run


def attention_on_simulated_npu(operator: str, function: Any) -> Any:
    """Return the function that computes the same on the simulated device, and is noted there."""

    def run(*args: Any, **kwargs: Any) -> Any:
        simulated_npu.launched.append(f"torch_npu.{operator}")
        args, kwargs = pytree.tree_map(to_cpu, (args, kwargs))
        return pytree.tree_map(to_npu, function(*args, **kwargs))

    return run


OPERATORS = {
    "npu_grouped_matmul": (SCHEMA, grouped_matmul, on_simulated_npu),
    **{
        name: (
            schema,
            by_name(name, function),
            attention_on_simulated_npu(name, by_name(name, function)),
        )
        for name, schema, function in (
            ("npu_fusion_attention", ATTENTION_SCHEMA, fusion_attention),
            ("npu_fusion_attention_grad", GRADIENT_SCHEMA, fusion_attention_gradient),
        )
    },
}
libraries = []
for operator, (schema, on_cpu, on_npu) in OPERATORS.items():
    if hasattr(torch.ops.npu, operator):
        continue
    libraries.append(torch.library.Library("npu", "FRAGMENT"))
    libraries[-1].define(schema)
    libraries[-1].impl(operator, on_cpu, "CPU")
    libraries[-1].impl(operator, on_npu, "PrivateUse1")
    if operator == "npu_grouped_matmul":
        libraries[-1].impl(operator, on_cpu, "Meta")
