"""`fuse` on every transformers model: the report accounts for every part that a reader expects."""

from __future__ import annotations

import pytest
import transformers
from torch import nn

import every_model
import fuse_report
import fuse_rules
from liger_ops import fuse

# Sequential shards take as long as a single test; pytest-xdist runs them in parallel.
SHARDS = 8

# Prefixes of the reasons given for unexpected failures in a probe.
FAILED = ("its probe failed", "it cannot be probed")


def models_in(model: nn.Module) -> list[tuple[type, str]]:
    """Return the class and the configuration of a model, and of each model in it."""
    return [
        (type(module), str(module.config.to_dict()))
        for module in model.modules()
        if isinstance(module, transformers.PreTrainedModel)
    ]


@pytest.mark.long
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_model(shard: int) -> None:
    """No exception, no failure in a probe, and no expected part missing from the report.

    A model that an earlier one of the shard contains, such as a vision tower, is not fused again:
    its modules are in the rules, the report and the row of that one.
    """
    transformers.logging.set_verbosity_error()
    recorded = fuse_report.DOCUMENT.read_text()
    is_recorded = fuse_report.version(recorded) == transformers.__version__
    lines = set(recorded.splitlines())
    count = 0
    inside: set[tuple[type, str]] = set()
    # Neighbours in a list by names: a model, and then its parts.
    model_types = every_model.model_types()
    first, end = (len(model_types) * i // SHARDS for i in (shard, shard + 1))
    for model_type in model_types[first:end]:
        model = every_model.built(model_type)
        if model is None:
            continue
        count += 1
        itself, *parts = models_in(model)
        if itself in inside:
            continue
        inside.update(parts)
        expected = {(rule.__name__, name) for rule in fuse_rules.RULES for name in rule(model)}
        class_name = type(model).__name__
        report = fuse(model)
        named = {entry.where for entry in (*report.fused, *report.left)}
        silent = [(rule, name) for rule, name in expected if name not in named]
        assert not silent, f"{model_type}: {sorted(silent)[:5]} are neither fused nor left"
        failed = [entry for entry in report.left if entry.reason.startswith(FAILED)]
        assert not failed, f"{model_type}: {failed[:5]}"
        row = str(fuse_report.Row(model_type, class_name, report))
        if is_recorded and f"| {model_type} |" in recorded:
            assert row in lines, (
                f"docs/reports/fuse.md has another row: {row}; see tests/support/fuse_report.py"
            )
    # There are about 100 models per shard.
    assert count > 50


def test_the_document_is_of_this_version() -> None:
    recorded = fuse_report.DOCUMENT.read_text()
    version = fuse_report.version(recorded)
    if version != transformers.__version__:
        pytest.skip(f"the report is of transformers {version}, not {transformers.__version__}")
    count = sum(f"| {model_type} | " in recorded for model_type in every_model.model_types())
    assert f"transformers {version}, {count} model types of" in recorded
