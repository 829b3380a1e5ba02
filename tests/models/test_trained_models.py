"""Train transformers models for one step with the `liger` backend, in every mode of MODES.

CHOSEN lists the models. `python tests/support/trained_models_report.py` trains all models and
writes docs/reports/models.md, with whose rows these are compared.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
import transformers
from packaging.version import Version
from transformers.models.auto import modeling_auto

from compiled_models import aot_eager, as_it_is
from liger_ops.rewrites import REWRITES
from trained_models import LEFT_OUT, MODELS, WITHOUT_PADDING
from trained_models_report import DOCUMENT, document, rows
from training_steps import MODES, check, own_results

NEW = Version(transformers.__version__) >= Version("5.23")

# Model -> what only its graphs have.
CHOSEN = {
    WITHOUT_PADDING: "attention without a mask, of grouped heads",
    "ArceeForCausalLM": "squared ReLU",
    "DeepseekV2ForCausalLM": "complex rotations, experts written in place",
    "DeepseekV3ForCausalLM": "rotations of pairs, a router that writes in place",
    "Gemma3ForConditionalGeneration": "a mask made by vmap, GEGLU",
    "GptOssForCausalLM": "experts that write in place, with biases and a clamped SwiGLU",
    "Idefics3ForConditionalGeneration": "a cache's empty tensor, graph breaks",
    "JambaForCausalLM": "associative_scan, functorch in it, beside attention",
    "Llama4ForCausalLM": "a router that writes in place",
    "Mistral4ForCausalLM": "latent attention",
    "PhimoeForCausalLM": "a router of its own autograd.Function",
    "T5ForConditionalGeneration": "an encoder and a decoder",
    "Wav2Vec2ForCTC": "sound, group norm",
}
# The others' graphs with checkpoints run as they are, which takes half the time.
AUTOGRAD_OF_CHECKPOINTS = (WITHOUT_PADDING, "GptOssForCausalLM")


@pytest.mark.parametrize("name", CHOSEN)
def test_trains_as_it_is(name: str) -> None:
    if not NEW and name not in MODELS:
        pytest.skip("an older transformers has no such model")
    model = MODELS[name]
    own = own_results(model)
    ops: Counter[str] = Counter()
    for mode in MODES:
        # Dynamo makes the same graph for both kinds of checkpoints: one model tests both.
        if mode != "reentrant" or name == "GptOssForCausalLM":
            autograd = mode == "plain" or name in AUTOGRAD_OF_CHECKPOINTS
            ops |= check(model, mode, own, aot_eager if autograd else as_it_is).ops
    if NEW:
        assert ops == rows()[name].ops


@pytest.mark.skipif(not NEW, reason="the document is of a newer transformers")
def test_every_rewrite_is_chosen() -> None:
    known = rows()
    # The models that write attention out have padding here, whose mask may hide every key of a row;
    # test_architectures has them without padding. Masks with data change on a GPU only. Models have
    # no log-probabilities of tokens; training code has. The models are not diffusers', whose blocks
    # have modulated norms. test_architectures has a norm with a gate, in Falcon-H1.
    elsewhere = {"attention", "masked_attention", "eager_attention", "linear_log_prob", "log_prob"}
    elsewhere |= {"modulated_rms_norm", "modulated_layer_norm", "gated_rms_norm"}
    # Models clamp the activation of experts, which moe_experts computes.
    elsewhere |= {"clamped_swiglu"}
    # By default a model does not return the logits of its routers, and has no loss of them.
    elsewhere |= {"router_losses"}
    # Hyper-connections, without a whole model, are in tests/rewrites/layers/test_rewrite_mhc.py.
    elsewhere |= {"mhc_coeffs", "mhc_pre", "mhc_post_res"}
    assert set().union(*(known[name].ops for name in CHOSEN)) == set(REWRITES) - elsewhere


@pytest.mark.skipif(not NEW, reason="the document is of a newer transformers")
def test_document_is_of_these_models() -> None:
    def without_versions(text: str) -> str:
        before, rest = text.split("Written by", 1)
        return before + rest.split("\n\n", 1)[1]

    known = rows()
    documented = re.search(r"transformers ([\d.]+)\.\n", DOCUMENT.read_text())
    assert documented and len(known.keys() & MODELS.keys()) > 200
    if documented[1] == transformers.__version__:
        # A later release has models that the document does not know yet.
        assert known.keys() == MODELS.keys()
    written = document(known).replace(f" of {len(MODELS)} models", f" of {len(known)} models")
    assert without_versions(DOCUMENT.read_text()) == without_versions(written)
    assert not [name for name, row in known.items() if "wrong" in str(row)]


def test_every_causal_model_is_there_or_left_out() -> None:
    causal = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    both = set(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values())
    assert (causal | both) - MODELS.keys() == LEFT_OUT.keys() & (causal | both)
