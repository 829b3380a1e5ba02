"""Every transformers model that can be built on the meta device, made small."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS = 4
VOCABULARY = 512
# Stands for no limit of layers or words.
ANY = 2**40

# The number of classes to try per model type.
CLASSES = 3

# A configuration is tried with classes in this order: first those with a head.
FIRST = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "MASKED_LM")
MAPPINGS = [f"MODEL_FOR_{name}_MAPPING" for name in FIRST] + [
    "MODEL_FOR_PRETRAINING_MAPPING",
    "MODEL_MAPPING",
]

# The names of attributes that are a number of layers.
COUNT = re.compile(r"^((num|n)_\w*layers?|\w*_layers|num_hidden_layers|depth|n_layer)$")


def model_types() -> list[str]:
    return sorted(CONFIG_MAPPING.keys())


def built(model_type: str) -> nn.Module | None:
    """Build a model of this type on the meta device.

    Return None if none of its classes can be built from the default configuration, or if a package
    is missing.
    """
    for layers, vocabulary in ((LAYERS, VOCABULARY), (ANY, VOCABULARY), (ANY, ANY)):
        try:
            config = CONFIG_MAPPING[model_type]()
            classes = classes_for(type(config))
            shrink(config, layers, vocabulary)
        except Exception:
            continue
        for cls in classes:
            try:
                with warnings.catch_warnings(), torch.device("meta"):
                    warnings.simplefilter("ignore")
                    return cls(copy.deepcopy(config))
            except Exception:
                continue
    return None


def classes_for(config: type) -> list[Any]:
    """List the first classes of a configuration, in the order of MAPPINGS."""
    others = [name for name in dir(modeling_auto) if re.fullmatch(r"MODEL_\w*MAPPING", name)]
    result = []
    for name in (*MAPPINGS, *others):
        mapping = getattr(modeling_auto, name)
        if config in mapping:
            classes = mapping[config]
            result.append(classes[0] if isinstance(classes, (tuple, list)) else classes)
    return list(dict.fromkeys(result))[:CLASSES]


def shrink(config: Any, layers: int, vocabulary: int) -> None:
    """Limit the layers and tokens in a configuration and its sub-configurations."""
    counts = set()
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            shrink(value, layers, vocabulary)
        elif isinstance(value, bool) or not isinstance(value, int):
            continue
        elif COUNT.fullmatch(name) and value > layers:
            counts.add(value)
            setattr(config, name, layers)
        elif name == "vocab_size" and value > vocabulary:
            config.vocab_size = vocabulary
        elif name.endswith("_token_id") and value >= vocabulary:
            setattr(config, name, 0)
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) in counts:
            setattr(config, name, value[:layers])
