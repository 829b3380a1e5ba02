"""Write docs/fuse.md: what `fuse` finds in every transformers model, and what it leaves.

    python tests/support/fuse_report.py

every_model.py builds the models; tests/fusion/test_fuse_every_model.py checks the document.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import transformers

import every_model
from liger_ops import fuse
from liger_ops.fusion import FuseReport

DOCUMENT = Path(__file__).parents[2] / "docs" / "fuse.md"

KINDS = {
    "norm": "norms",
    "modulated norm": "modulated norms",
    "gated activation": "gated activations",
    "rotary embedding": "rotary embeddings",
    "attention": "attention",
    "loss": "loss",
    "hyper connection": "hyper-connections",
}

INTRODUCTION = """\
# What `liger_ops.fuse` finds in models of transformers

Written by `python tests/support/fuse_report.py`; `tests/fusion/test_fuse_every_model.py`
fails where it is not so.

transformers {version}, {count} model types of {types}: all that can be built from their default
configurations without another package, on the meta device, with at most {layers} layers where their
code allows it.

A number is of modules: "4" of which all are fused, "3 of 4" of which three are. Counted are those
that `fuse` fuses, and those that it names in `report.left`; the reasons follow the table.

## Attention

`fuse` registers mask and attention functions in transformers' `AttentionMaskInterface` and
`AttentionInterface`, and writes their name, `liger`, or `liger_` and a number for code with sinks
or soft caps, into the configuration of each model that makes causal masks. `unfuse` writes the
model's own name there again. `save_pretrained` does not save the name. On an NVIDIA GPU from
compute capability 8.0, in bfloat16 and float16, also by autocast, and for as many queries as keys:

| mask | engine |
| --- | --- |
| causal, also after a look at a padding mask of ones | SDPA: is_causal=True, grouped heads |
| causal with a sliding window, heads of more than 128 | flash attention: a window, grouped heads |
| other windows, padding, packed `position_ids`, chunks | flex_attention: a block mask |
| any of these, with sinks (GPT-OSS) | flex_attention: its result times sigmoid(lse - sink) |
| any of these, with a soft cap (Gemma 2) | flex_attention: its scores are capped |

A block mask is made once for each kind of mask in a forward, and shared by the layers. No dense
mask is stored: a compiled model evaluates it inside the sums over blocks of 128 x 128, and an eager
one in parts of 64 MiB. A compiled model cannot look at its padding mask, so a mask of ones is a
block mask there, and a step of a Qwen3-like model takes 7% more than with `backend="liger"`, which
looks ([compile.md](compile.md)). Given neither attention_mask nor position_ids a compiled model is
causal: a trace of its forward shows that it makes consecutive positions.

Everything else is what the model had, dense masks included: other devices, float32, queries that
follow a cache, masks of four dimensions, mask functions of users, `output_attentions=True`, and
dropout that is turned on later. A model is left if its attention has dropout, keys and values of
different sizes, a soft cap that SDPA leaves out, or an implementation that was chosen, such as
flash_attention_2 or, where SDPA is the default, eager.

Results are those of the dense mask up to rounding. A query without a visible key, such as padding
on the left, gives zeros, as SDPA does and as code with sinks does. Code with soft caps gives it the
mean of all values, and so does `fuse`; in float16 such batches take the dense mask. Documents are
packed for the models that the implementation "sdpa" packs them for: `position_ids` that start
again, and no attention_mask. cu_seq_lens alone have no effect, as there.

Call `unfuse`, or `fuse(model, attention=False)`, before code that asks for an implementation by its
name: context parallelism of `Trainer`, continuous batching, `config.output_attentions = True`. A
configuration that several models share names the implementation for all of them.

## Changes after `fuse`

What each door assumes of a model after it was applied, and what happens when that is so no longer:

| door | assumed | a change |
| --- | --- | --- |
| `fuse`: gated activations, norms, modulated norms, hyper-connections | every attribute that the \
traced code read, of the module, of the children that are not called and of objects such as a \
configuration; these children, without hooks and with the forwards of their classes; the traced \
dtypes | the module's own code runs, in the same call, eager and compiled. One warning for a \
module and a reason; none in compiled code, or for a dtype |
| `fuse`: rotary functions | the function that the forward's file names, and the functions that \
it calls; the form of the call | the file's function runs |
| `fuse`: attention | the functions of transformers' registries, or of the model's file; the \
implementation's name | the registered functions run, and get a dense mask |
| `fuse`: the loss | the loss function, the head, its hooks and adapters | all logits are \
computed, with a warning once |
| `torch.compile(model, backend="liger")` and `enable()` | what Dynamo guards on | Dynamo \
compiles again. It guards on no hooks, of any model: \
`torch._dynamo.config.skip_nnmodule_hook_guards` |

In each: the code of classes, and of functions other than rotary and attention functions, stays as
it was. Hooks of a fused module itself, and a forward that is set on it, work as without `fuse`. The
hooks of FSDP2 and DeepSpeed on an activation without parameters change nothing. A module whose code
decides by a length or a batch, outside of calls of PyTorch, is left; one that is another op in
float64 runs its own code there. `make test ARGS=tests/fusion/test_fuse_changes.py` changes each of
these after `fuse`, and compares results and gradients with an untouched model.

## Norms of heads

The norms of queries and keys and their rotation, as in Qwen3 and Gemma 3, are fused as modules of
norms and as a rotary function, and run one after the other. `liger_ops.rms_norm_rope` computes both
in one pass, but `fuse` does not use it. The norms are modules, and the forward of the attention
passes views of their results to the rotation. So a norm would have to return a stand-in, which is
computed when anything but the rotation uses it. Code that takes a tensor cannot always be told from
the rotation: the gradient of a stand-in given to a torch.autograd.Function would be lost without an
error, and hooks of the norm, which FSDP2 and accelerate set, would see a result that is not a
tensor. `backend="liger"` sees all uses of the norms in its graph, and uses the op, also in a fused
model that is compiled, whole or layer by layer ([compile.md](compile.md)).

## Modulated norms

A module that projects an embedding, takes scale and shift from the projection and returns
norm(x) * (1 + scale) + shift gets a forward that calls `modulated_layer_norm` or
`modulated_rms_norm`. It returns the same further chunks, such as gates, and calls the same children
in the same order, except for the norms, whose parameters it reads. With hooks on such
a norm the module's own code runs. In diffusers 0.42 these are AdaLayerNorm, AdaLayerNormZero,
AdaLayerNormZeroSingle, AdaLayerNormContinuous, SD35AdaLayerNormZeroX, CogVideoXLayerNormZero,
LuminaRMSNormZero, LuminaLayerNormContinuous and those of CogView 4: the norms of DiT, SD3, SD3.5,
Flux, AuraFlow, HunyuanVideo and Lumina 2 before attention, and their last norm. In transformers
these are the norms of Qwen2.5-Omni's speech decoder.

What is modulated in a block's own forward stays there. The second norm of the blocks of DiT, SD3
and Flux, and all of Wan, PixArt, Sana, LTX and QwenImage, is a `torch.nn.LayerNorm` or an RMSNorm
of its own, mostly without a weight. `fuse` replaces it, and the modulation remains two operations
of PyTorch. `backend="liger"` finds these too, before `fuse` and after it
([compile.md](compile.md)), with all rewrites. Mochi's norms compute in a float32 scale, and are
left.

The module's own code runs for a call with other arguments than those that its projection and norm
use, for x of other dimensions than (B, T, N), for a scale that is neither for all of x, nor for
each sample, nor for each token, and where x, scale and the norm's parameters have dtypes for which
the code does not return x's.

## Heads with adapters of peft

What peft does to a head is seen at each call, so that `fuse` may come before or after
`get_peft_model`, and adapters may be added, switched, merged and disabled in between. The loss is
computed without logits for

- a head in `modules_to_save`;
- a head with LoRA (`target_modules` with `lm_head`), of one active adapter or several, with any
  scaling (rsLoRA) and with dropout, which draws the mask that it draws without `fuse`. The adapted
  weight is not formed: `linear_cross_entropy` adds a second product to a chunk of logits. The
  adapters have gradients, and a frozen head has none. Adapters of another dtype than the head's,
  such as float32 beside bfloat16, give lora_x and lora_b in that dtype, and both are rounded to
  the head's for the second product, which peft computes in the adapters' dtype;
- a head whose adapters are merged or disabled, but not both;
- a head tied to an embedding: a LoRA of the embedding alone changes no logits;
- each of these, sharded by FSDP2 with its adapters, by itself or with the last norm, as accelerate
  does.

A step with any other adapter of the head computes all logits with peft's code, and warns once:
DoRA and the other variants of LoRA, `lora_bias=True`, adapters with hooks or with parameters that
are sharded in another way than [distributed.md](distributed.md#tensor-parallelism) has, adapters
that are merged and disabled, which their next call unmerges, and everything that is not LoRA.

## Hyper-connections

The connections of DeepSeek-V4 and GLM-5.3 (`glm5_next`) compute `mhc_coeffs` and `mhc_pre`. The
class of each gets a forward that calls both; the parameters fn, base and scale stay. It computes in
float32, also under autocast, where the model's code rounds the product with fn. The module's own
code runs for float64 and, under autocast, if base or scale are not float32: it returns other dtypes
there than the op. The connection's norm is not called by the new forward; the table counts it among
the norms that are left.

The streams are mixed after a layer in the decoder layer's forward, which `fuse` does not change.
`backend="liger"` finds that too, as `mhc_post_res`, before `fuse` and after it
([compile.md](compile.md)). The connection before the last norm of DeepSeek-V4 (`HyperHead`) has the
weights of a sum alone, and that of GLM-5.3 is a mean. The connections of HYV4 have no matrix, and
the gated residuals of Qwen4 compute something else.

## Ops that `fuse` does not look for

- `embedding`: `torch.nn.Embedding` is left. Its forward is the same call of PyTorch as the op's,
  and the op's gradient is summed in another order, so it differs in the last bits. To have that
  order, replace the module by `liger_ops.nn.Embedding`; `fuse` has no option for it.
- `attn_res`: no model has it. The attention residuals of Inkling 2 add normalised blocks, and the
  op adds the blocks themselves.
- `neighborhood_attention`: no model has it. DiNAT calls the package natten, with a bias of the
  scores for each relative position, which the op does not have.
- `dyt`, `poly_norm` and `sparsemax`: no model has them.
- `tiled_mlp`: any gated MLP could be computed by it. It computes the forward twice to save memory,
  which is the user's choice: `liger_ops.nn.TiledMLP`.
"""

# Number of classes to name for each reason.
NAMED = 4


@dataclass(frozen=True)
class Row:
    """The report of `fuse` for one model."""

    model_type: str
    class_name: str
    report: FuseReport

    def __str__(self) -> str:
        cells = (self.cell(kind) for kind in KINDS)
        return f"| {self.model_type} | {self.class_name} | {' | '.join(cells)} |"

    def cell(self, kind: str) -> str:
        fused = sum(entry.kind == kind for entry in self.report.fused)
        left = sum(entry.kind == kind for entry in self.report.left)
        if not left:
            return str(fused or "")
        return f"**{fused} of {fused + left}**"


def rows(model_types: Iterable[str]) -> Iterator[Row]:
    for model_type in model_types:
        model = every_model.built(model_type)
        if model is not None:
            yield Row(model_type, type(model).__name__, fuse(model))


def version(document: str) -> str:
    """The version of transformers that a document was written with."""
    return document.partition("\ntransformers ")[2].partition(",")[0]


def reasons(found: list[Row], kind: str) -> Iterator[str]:
    """One line per reason for which modules of a kind are left, the most frequent first."""
    places = defaultdict(list)
    for row in found:
        for entry in row.report.left:
            if entry.kind == kind:
                places[entry.reason].append((entry.class_name, row.model_type))
    for reason, at in sorted(places.items(), key=lambda item: (-len(item[1]), item[0])):
        counts = Counter(class_name for class_name, _ in at)
        names = [name for name, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        types = len({model_type for _, model_type in at})
        where = f"{len(at)} in {types} model type{'s' if types > 1 else ''}"
        yield f"- {where}: `{reason}` ({', '.join(names[:NAMED])}{more})"


def document() -> str:
    model_types = every_model.model_types()
    found = list(rows(model_types))
    lines = [
        INTRODUCTION.format(
            version=transformers.__version__,
            count=len(found),
            types=len(model_types),
            layers=every_model.LAYERS,
        ),
        f"| model type | class | {' | '.join(KINDS.values())} |",
        f"|{' --- |' * (len(KINDS) + 2)}",
        *map(str, found),
    ]
    for kind, title in KINDS.items():
        lines += [f"\n## Left: {title}\n", *reasons(found, kind)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    DOCUMENT.write_text(document())
