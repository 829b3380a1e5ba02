"""`python -m liger_ops.migrate`, its table of Liger-Kernel's names, and docs/from-liger-kernel.md.

`tests/support/project/liger_kernel_names.json` has the public names of Liger-Kernel 0.8.5 with
their signatures, read from its wheel: what its packages export, the functions of `functional`, and
the classes and functions of its submodules whose names begin with Liger, liger, apply or triton.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import liger_kernel_page
import liger_ops
import liger_ops.integrations.megatron
import liger_ops.integrations.trl
from liger_ops.losses.kto import LOSS_TYPES
from liger_ops.losses.modules import LinearLoss
from liger_ops.losses.pair_losses import PAIR_LOSSES
from liger_ops.migrate import __main__ as command
from liger_ops.migrate import table
from liger_ops.migrate.places import in_lines, in_python
from sources import ROOT, imported_modules

NAMES = json.loads((ROOT / "tests/support/project/liger_kernel_names.json").read_text())
PUBLIC = {
    (package, name): v for package, names in NAMES["names"].items() for name, v in names.items()
}
ROWS = table.rows()
CALLED = {key: row for key, row in ROWS.items() if row.options is not None and row.here}
CODE = {key: row for key, row in ROWS.items() if row.options is None and row.here}


def name_of(key: Any) -> str | None:
    return ".".join(key) if isinstance(key, tuple) else None


def signature(text: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of a signature as the data has it."""
    function = eval(f"lambda {text[1:-1]}: None", {"_CHUNK_MEM_CONST": 1, "torch": torch})
    return dict(inspect.signature(function).parameters)


@pytest.mark.quick
def test_every_public_name_has_a_row() -> None:
    assert NAMES["version"] == table.version() and len(PUBLIC) > 250
    assert [key for key in PUBLIC if key not in ROWS] == []


def test_the_other_rows_are_known_to_be_less_public() -> None:
    others = {
        name for package, name in ROWS if (package, name) not in PUBLIC and package != "settings"
    }
    assert others == {
        "*", "MODEL_TYPE_TO_APPLY_LIGER_FN", "fused_selective_log_softmax", "infer_device",
        "print_env_report",
    }  # fmt: skip


@pytest.mark.parametrize("key", CALLED, ids=name_of)
def test_options_are_those_of_liger_kernel(key: tuple[str, str]) -> None:
    """Every option has an entry, in the order in which a call passes it."""
    row, known = CALLED[key], PUBLIC[key]
    theirs = [option.theirs for option in row.options or () if option.theirs]
    parameters = signature(known.get("signature", "()"))
    if row.name == "LigerKLDIVLoss":
        # Its further arguments are those of torch.nn.KLDivLoss.
        del parameters["args"], parameters["kwargs"]
        parameters |= inspect.signature(nn.KLDivLoss).parameters
    assert theirs == [name for name in parameters if name != "kwargs"]
    if row.call:
        assert [option.theirs for option in row.call] == [*signature(known["forward"])]


def accepted(here: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function or class, with the options of a loss's module."""
    function = resolve_name(here)
    found = dict(inspect.signature(function).parameters)
    if inspect.isclass(function) and issubclass(function, LinearLoss):
        found |= inspect.signature(function.loss).parameters
    return found


@pytest.mark.parametrize("key", CALLED, ids=name_of)
def test_options_exist_here(key: tuple[str, str]) -> None:
    row = CALLED[key]
    wanted = {option.ours for option in row.options or () if option.ours}
    assert wanted <= set(accepted(row.here))
    if row.call:
        forward = inspect.signature(resolve_name(row.here).forward).parameters
        given = {option.ours for option in row.call if option.ours}
        tensors = {"old_log_prob", "vllm_is_ratio", "num_items_in_batch"}
        assert given - set(forward) <= (tensors if "GRPO" in row.here else set())


@pytest.mark.parametrize("key", CALLED, ids=name_of)
def test_defaults_that_differ_are_passed(key: tuple[str, str]) -> None:
    row, parameters = CALLED[key], signature(PUBLIC[key].get("signature", "()"))
    # `fuse` fuses what computes the same, whatever Liger-Kernel's default is.
    if row.section == "models":
        return
    for option in row.options or ():
        theirs, ours = parameters.get(option.theirs), accepted(row.here).get(option.ours)
        if theirs is None or ours is None or theirs.default is theirs.empty or option.value:
            continue
        assert theirs.default == ours.default, option


@pytest.mark.parametrize("key", CALLED, ids=name_of)
def test_a_dropped_option_has_a_reason(key: tuple[str, str]) -> None:
    row = CALLED[key]
    for option in row.options or ():
        if not option.ours:
            named = f"`{option.theirs}" in row.note
            assert named or option.theirs in table.dropped(), option.theirs


@pytest.mark.quick
def test_what_has_no_counterpart_says_why() -> None:
    assert [row.name for row in ROWS.values() if not row.here and not row.note] == []


def test_names_in_notes_exist() -> None:
    notes = [row.note for row in ROWS.values()] + [*table.dropped().values()]
    named = set(re.findall(r"`(liger_ops(?:\.\w+)+)", " ".join(notes)))
    assert len(named) > 8 and all(resolve_name(name) is not None for name in named)
    chunked = " ".join(row.note for row in table.in_section("chunked"))
    loss_types = set(re.findall(r'"(\w+)"', chunked))
    assert loss_types and loss_types <= {*PAIR_LOSSES, *LOSS_TYPES}
    # `as X` refers to a row.
    others = re.findall(r"(?<!such )\bas (?:for )?`(\w+)`", " ".join(notes))
    assert len(others) > 20 and set(others) <= {name for _, name in ROWS}


# What the replacements are called with: tensors and sizes by the names of arguments.
B, T, D, V, I = 2, 3, 8, 5, 6
SHAPES: dict[str, tuple[int, ...]] = {
    "x": (B * T, D), "hidden": (B * T, D), "input": (B * T, V), "residual": (B * T, D),
    "bias": (V,), "beta": (D,), "gamma": (D,), "alpha": (1,), "scale": (D,), "shift": (D,),
    "gate": (B, D), "up": (B, D), "student_x": (B * T, D), "teacher_x": (B * T, D),
    "student_weight": (V, D), "teacher_weight": (V, D), "student_logits": (B * T, V),
    "teacher_logits": (B * T, V), "logits": (B * T, V), "weight": (V, D), "p": (B * T, V),
    "q": (B, 2, T, D), "k": (B, 1, T, D), "cos": (1, T, D), "sin": (1, T, D),
    "query": (B, 2, 9, D), "key": (B, 2, 9, D), "value": (B, 2, 9, D), "scores": (B, 2, T, T),
    "phi": (2 * D, 8), "b": (8,), "alpha_pre": (), "alpha_post": (), "alpha_res": (),
    "h_pre": (B, 2), "h_post": (B, 2), "h_res": (B, 2, 2), "f_out": (B, D),
    "gate_weight": (I, D), "up_weight": (I, D), "down_weight": (D, I), "down": (4, D, I),
    "gate_up": (4, 2 * I, D), "top_k_weights": (B * T, 2), "ref_x": (B * T, D),
    "ref_weight": (V, D), "kl": (),
}  # fmt: skip
VALUES: dict[str, Any] = {
    "hidden_size": D, "normalized_shape": D, "num_channels": 4, "num_groups": 2, "hc": 2,
    "num_embeddings": V, "embedding_dim": D, "in_channels": 2, "out_channels": 2,
    "kernel_size": 3, "eps": 1e-6, "dim": -1, "num_experts": 4, "intermediate_size": I,
    "gate_multiplier": 0.5, "down_multiplier": 2.0, "temperature": 2.0, "num_tiles": 2,
    "vocab_size": V, "sections": [1, 1, 2], "shift_labels": None, "padding_idx": None,
    "dilation": 1, "tmax": 3, "rms_eps": 1e-6, "pre_eps": 0.0, "sinkhorn_eps": 1e-6,
    "post_mult": 2.0, "config": SimpleNamespace(hidden_size=D, intermediate_size=I),
}  # fmt: skip
# The arguments that have another shape for these.
SPECIAL: dict[str, dict[str, tuple[int, ...]]] = {
    "rms_norm": {"weight": (D,)}, "fused_add_rms_norm": {"weight": (D,)},
    "modulated_rms_norm": {"weight": (D,)}, "layer_norm": {"weight": (D,), "bias": (D,)},
    "group_norm": {"x": (B, 4, 3), "weight": (4,), "bias": (4,)},
    "GroupNorm": {"input": (B, 4, 3)}, "LayerNorm": {"input": (B, D)},
    "poly_norm": {"weight": (3,), "bias": (1,)}, "softmax": {"x": (B, V)},
    "attn_res": {"x": (3, B, T, D), "query": (D,), "weight": (D,)},
    "multi_token_attention": {"weight": (2, 2, 3, 3), "bias": (2,)},
    "mhc_coeffs": {"x": (B, 2, D)}, "mhc_pre": {"x": (B, 2, D)}, "mhc_post_res": {"x": (B, 2, D)},
    "MHC": {"x": (B, 2, D)}, "cross_entropy": {"weight": (V,)}, "jsd": {"target": (B * T, V)},
    "JSD": {"target": (B * T, V)}, "kl_div": {"target": (B * T, V)},
    "KLDiv": {"target": (B * T, V)}, "TVD": {"q": (B * T, V)}, "tvd": {"q": (B * T, V)},
    "NeighborhoodAttention": {"q": (B, 2, 9, D)},
}  # fmt: skip


def sample(here: str, name: str) -> Any:
    """Return a value for an argument of a function or class."""
    short = here.rpartition(".")[2]
    shape = SPECIAL.get(short, {}).get(name, SHAPES.get(name))
    if "losses." in here and name in ("x", "ref_x"):
        shape = (B, T, D)
    if shape is not None:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        is_probability = name in ("p", "q", "target") and shape[-1] == V
        return values.softmax(-1) if is_probability else values
    if name == "target":
        rows = (B, T) if "losses." in here else (B * T,)
        return torch.arange(B * T).reshape(rows) % V
    if name in ("indices", "top_k_index"):
        return torch.tensor([[0, 3]] * (B * T))
    if name == "preference_labels":
        return torch.tensor([True, False])
    if name in ("advantages", "old_log_prob", "ref_log_prob"):
        return torch.full((B,) if name == "advantages" else (B, T), 0.5)
    if name == "layer":
        return nn.Linear(D, D)
    return VALUES[name]


def free_names(code: str) -> set[str]:
    """Return the names that code mentions, without modules, builtins and what it binds."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    bound = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
    return (
        {node.id for node in nodes}
        - bound
        - {"liger_ops", "torch", *set(dir(builtins)) - {"input"}}
    )


def called_with(row: table.NameRow, parameters: dict[str, inspect.Parameter]) -> ast.Call:
    """Return a call of Liger-Kernel's name with the options that have no default."""
    ours = {option.theirs: option.ours for option in row.options or ()}
    keywords = ", ".join(
        f"{name}={ours[name] or None}"
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name in ours
    )
    call = ast.parse(f"{row.name}({keywords})", mode="eval").body
    assert isinstance(call, ast.Call)
    return call


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A process group of this process alone."""
    file = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", store=dist.FileStore(str(file), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


ONLY_CALLS = [key for key, row in CALLED.items() if row.section != "models"]


@pytest.mark.parametrize("key", ONLY_CALLS, ids=name_of)
def test_replaced_calls_run(key: tuple[str, str], group: Any) -> None:
    row = CALLED[key]
    parameters = signature(PUBLIC[key].get("signature", "()"))
    code = table.replacement(row, called_with(row, parameters)).code
    names = {name: sample(row.here, name) for name in free_names(code) - {"group"}}
    if "per_pair=True" in code:
        names |= {name: names[name][..., : D // 2] for name in ("cos", "sin")}
    if "sections=" in code:
        names |= {name: names[name].expand(3, 1, T, D) for name in ("cos", "sin")}
    if row.name == "LigerRMSNormForMuseGlimmer":
        code = code.replace(")", ", elementwise_affine=False)")
    result = eval(code, {"liger_ops": liger_ops, "torch": torch, "group": group, **names})
    if isinstance(result, nn.Module) and row.call:
        optional = signature(PUBLIC[key]["forward"])
        given = {
            option.ours: sample(row.here, option.ours)
            for option in row.call
            if option.ours and optional[option.theirs].default is inspect.Parameter.empty
        }
        if "KTO" in row.name:
            given |= {n: sample(row.here, n) for n in ("preference_labels", "ref_log_prob", "kl")}
        if row.name.endswith(("DPOLoss", "GRPOLoss")):
            given["ref_log_prob"] = sample(row.here, "ref_log_prob")
        result = result(**given)
    values = result if isinstance(result, tuple) else (result,)
    tensors = [value for value in values if isinstance(value, Tensor)]
    assert tensors or row.name in ("LigerFusedNeighborhoodAttention",)
    assert all(value.isfinite().all() for value in tensors)


def linear(columns: int, rows: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False)


@functools.cache
def small_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


def names_for(row: table.NameRow, group: Any) -> dict[str, Any]:
    """Return what the code of a row mentions."""
    names: dict[str, Any] = {
        "liger_ops": liger_ops, "torch": torch, "tp_group": group, "name": "name",
        "gate_proj": linear(D, D), "up_proj": linear(D, D), "down_proj": linear(D, D),
        "gate_up_proj": linear(D, 2 * D), "w1": linear(D, D), "w2": linear(D, D),
        "w3": linear(D, D), "mlp": linear(D, D), "layer": linear(D, D), "scale": None,
        "xq": torch.randn(B, T, 2, D), "xk": torch.randn(B, T, 1, D),
        "freqs_cis": torch.randn(T, D // 2, dtype=torch.complex64), "old_logp": torch.randn(B, T),
        "ref_logp": torch.randn(B, T), "completion_mask": torch.ones(B, T),
        "completion_ids": torch.ones(B, T, dtype=torch.int64), "batch": {},
    }  # fmt: skip
    names |= {"query": names["xq"], "key": names["xk"], "freqs_ci": names["freqs_cis"]}
    if row.name in ("liger_rotary_pos_emb_vision", "LigerLlama4RopeFunction"):
        names |= {"q": torch.randn(B, T, 2, D), "k": torch.randn(B, T, 1, D)}
        if "vision" in row.name:
            names |= {"q": torch.randn(T, 2, D), "k": torch.randn(T, 1, D)}
    if "completion_ids" in row.here:
        names["logits"] = torch.randn(B, T + 1, V)
    elif "teacher_logits=target.log()" in row.here:
        names["target"] = torch.rand(B * T, V).softmax(-1)
    elif "mhc" in row.here.lower():
        names["x"] = torch.randn(B, 2, D)
    here = "liger_ops.losses.LinearXLoss" if "losses." in row.here else ""
    names |= {name: sample(here, name) for name in free_names(row.here) - set(names)}
    return names


# One row of those with the same code. Some changes a model, or installs the ops in a process.
ONCE = {row.here: key for key, row in CODE.items() if row.section != "launchers"}
MODEL = [key for code, key in ONCE.items() if re.search(r"\bmodel\b|install\(|^liger_ops$", code)]
RUN = [key for key in ONCE.values() if key not in MODEL]


@pytest.mark.parametrize("key", RUN, ids=name_of)
def test_replacing_code_runs(key: tuple[str, str], group: Any) -> None:
    row = CODE[key]
    names = names_for(row, group)
    exec(compile(row.here, row.name, "exec"), names)


@pytest.mark.parametrize("key", MODEL, ids=name_of)
def test_replacing_code_of_models_runs(
    key: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row, model = CODE[key], small_model()
    loaded = SimpleNamespace(
        AutoModelForCausalLM=SimpleNamespace(from_pretrained=lambda name: small_model())
    )
    installed: list[bool] = []
    for integration in (liger_ops.integrations.trl, liger_ops.integrations.megatron):
        monkeypatch.setattr(integration, "install", lambda: installed.append(True))
    ids = torch.tensor([[1, 2, 3]])
    names = {
        "liger_ops": liger_ops, "torch": torch, "model": model, "name": "name",
        "transformers": loaded, "batch": {"input_ids": ids, "labels": ids},
    }  # fmt: skip
    if "batch" in row.here:
        liger_ops.fuse(model)
    exec(compile(row.here, row.name, "exec"), names)
    assert "install" not in row.here or installed
    assert "fuse" not in row.here or liger_ops.unfuse(model) > 0
    liger_ops.unfuse(model)


@pytest.mark.parametrize("key", [k for k in CALLED if k not in ONLY_CALLS], ids=name_of)
def test_calls_of_models_are_calls_of_fuse(key: tuple[str, str]) -> None:
    row = CALLED[key]
    parameters = signature(PUBLIC[key]["signature"])
    switches = [name for name in parameters if name not in ("model", "kwargs", "cross_entropy")]
    text = ", ".join(f"{name}=False" for name in switches)
    call = ast.parse(f"{row.name}({text}, model=lm)", mode="eval").body
    replaced = ast.parse(table.replacement(row, call).code, mode="eval").body  # type: ignore[arg-type]
    assert isinstance(replaced, ast.Call) and ast.unparse(replaced.args[0]) == "lm"
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in replaced.keywords}
    assert keywords and set(keywords.values()) == {"False"}
    assert set(keywords) <= set(inspect.signature(liger_ops.fuse).parameters)


def test_launchers_are_ops() -> None:
    for row in table.in_section("launchers"):
        *_, namespace, op = row.here.split(".")
        assert hasattr(getattr(torch.ops, namespace), op), row.here


@pytest.mark.quick
def test_the_page_has_these_rows() -> None:
    page = liger_kernel_page.PAGE.read_text()
    sections = {row.section for row in ROWS.values()}
    assert sorted(liger_kernel_page.tables(page)) == sorted(sections | {"dropped", "switches"})
    assert page == liger_kernel_page.written(page), (
        "the tables are not those of names.toml: python tests/support/project/liger_kernel_page.py"
    )
    missing = [row.name for row in ROWS.values() if f"| `{row.name}` | " not in page]
    assert missing == []


def test_another_row_is_found() -> None:
    page = liger_kernel_page.PAGE.read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `LigerRMSNorm` |"))
    other = page.replace(row, row.replace("nn.RMSNorm", "nn.LayerNorm"))
    assert other != page and liger_kernel_page.written(other) == page
    assert liger_kernel_page.written(page.replace(row + "\n", "")) == page


def shown(source: str) -> list[tuple[int, str, str]]:
    """Return the line, the text and the code of each place of a source."""
    found = in_python("x.py", source)
    return [(p.line, p.text, p.here.code) for p in found if p.here is not None]


def uses(source: str) -> list[str]:
    """Return the code that replaces what is not an import."""
    return [code for _, text, code in shown(source) if not text.startswith(("import ", "from "))]


NORM = "liger_ops.nn.RMSNorm(hidden_size=8)"


@pytest.mark.parametrize(
    "source",
    [
        "from liger_kernel.transformers import LigerRMSNorm\nLigerRMSNorm(8)",
        "from liger_kernel.transformers import LigerRMSNorm as Norm\nNorm(8)",
        "from liger_kernel.transformers.rms_norm import LigerRMSNorm as Norm\nNorm(8)",
        "import liger_kernel.transformers\nliger_kernel.transformers.LigerRMSNorm(8)",
        "import liger_kernel.transformers.rms_norm as m\nm.LigerRMSNorm(hidden_size=8)",
        "import liger_kernel as lk\nlk.transformers.LigerRMSNorm(8)",
        "from liger_kernel import transformers as t\nt.LigerRMSNorm(8)",
        "from liger_kernel.transformers import *\nLigerRMSNorm(8)",
        "def f():\n    from liger_kernel.transformers import LigerRMSNorm\n    LigerRMSNorm(8)",
        "try:\n    from liger_kernel.transformers import LigerRMSNorm as N\n"
        "except ImportError:\n    N = None\nif N:\n    N(8)",
        "import importlib\nm = importlib.import_module('liger_kernel.transformers')\n"
        "m.LigerRMSNorm(8)",
        "import liger_kernel.transformers as t\ngetattr(t, 'LigerRMSNorm')(8)",
        "class A:\n    def f(self):\n        import liger_kernel.transformers as t\n"
        "        self.norm = t.LigerRMSNorm(8)",
        "from liger_kernel.transformers import LigerRMSNorm\nx = [LigerRMSNorm(8) for _ in y]",
        "from liger_kernel.transformers import LigerRMSNorm\nf(lambda: LigerRMSNorm(8))",
    ],
)
def test_spellings_of_a_call(source: str) -> None:
    assert NORM in uses(source)
    assert any(code == "import liger_ops" for _, _, code in shown(source))


@pytest.mark.quick
def test_a_name_that_is_assigned_to_another_is_followed() -> None:
    source = "import liger_kernel.transformers as t\nNorm = t.LigerRMSNorm\nNorm(8)"
    assert uses(source) == ["liger_ops.nn.RMSNorm", NORM]


@pytest.mark.parametrize(
    "source",
    [
        "def LigerRMSNorm(n): ...\nLigerRMSNorm(8)",
        "from .local import LigerRMSNorm\nLigerRMSNorm(8)",
        "from liger_kernel_tools import LigerRMSNorm\nLigerRMSNorm(8)",
        "from .liger_kernel import LigerRMSNorm\nLigerRMSNorm(8)",
        "x = 'see liger_kernel.transformers'  # use_liger_kernel=True",
        '"""Set use_liger_kernel=True."""',
    ],
)
def test_other_names_are_not_found(source: str) -> None:
    assert shown(source) == []


@pytest.mark.parametrize(
    "source",
    ["find_spec('liger_kernel')", "import_module('liger_kernel.transformers')",
     "modules = ['liger_kernel.ops']"],
)  # fmt: skip
def test_modules_are_found_by_name(source: str) -> None:
    assert [code for _, _, code in shown(source)] == ["import liger_ops"]


def test_a_parameter_hides_an_import() -> None:
    source = "from liger_kernel.transformers import LigerRMSNorm as N\ndef f(N):\n    N(8)\n"
    assert uses(source) == []


@pytest.mark.parametrize(
    ("call", "code", "remark"),
    [
        ("LigerRMSNorm(8, 1e-5, 1.0, 'gemma')",
         "liger_ops.nn.RMSNorm(hidden_size=8, eps=1e-05, offset=1.0, casting_mode='gemma')", ""),
        ("LigerRMSNorm(8, in_place=True)", NORM, "no op writes into an argument"),
        ("LigerRMSNorm(8, in_place=False)", NORM, ""),
        ("LigerRMSNorm(8, new=3)", NORM, "`new` is not an option of version 0.8.5"),
        ("LigerRMSNorm(*sizes)", "liger_ops.nn.RMSNorm()", "`*sizes` is not read"),
        ("LigerRMSNorm(8, **options)", NORM, "`**options` is not read"),
        ("LigerRMSNorm(1, 2, 3, 4, 5, 6, 7, 8, 9)",
         "liger_ops.nn.RMSNorm(hidden_size=1, eps=2, offset=3, casting_mode=4,"
         " elementwise_affine=8)", "takes 8 positional arguments"),
        ("LigerLayerNorm(8)", "liger_ops.nn.LayerNorm(normalized_shape=8, eps=1e-06)", "`bias`"),
        ("apply_liger_kernel_to_llama()", "liger_ops.fuse(model)", "when the model is made"),
        ("apply_liger_kernel_to_llama(model=m, rope=False)", "liger_ops.fuse(m, rope=False)", ""),
        ("apply_liger_kernel_to_llama(rope=True, swiglu=False, model=m)",
         "liger_ops.fuse(m, activations=False)", ""),
        ("apply_liger_kernel_to_llama(cross_entropy=True, fused_linear_cross_entropy=False)",
         "liger_ops.fuse(model, loss=False)", "no `cross_entropy`"),
        ("apply_liger_kernel_to_gemma3(rms_norm=a, layer_norm=b)",
         "liger_ops.fuse(model, norms=b)", "`norms` is one switch here"),
        ("LigerFusedLinearCrossEntropyLoss(ce_weight=w, softcap=30.0)",
         "liger_ops.nn.LinearCrossEntropyLoss(weight=w, softcap=30.0)", "x=_input"),
        ("AutoLigerKernelForCausalLM.from_pretrained('a')",
         "model = transformers.AutoModelForCausalLM.from_pretrained(name); liger_ops.fuse(model)",
         "switches"),
        ("is_transformers_available()", "", "needs no transformers"),
        ("LigerNewer(8)", "", "not a public name of Liger-Kernel 0.8.5"),
    ],
)  # fmt: skip
def test_calls_are_replaced_with_their_arguments(call: str, code: str, remark: str) -> None:
    name = re.split(r"[(.]", call)[0]
    source = f"from liger_kernel.transformers import {name}\n{call}\n"
    *_, place = in_python("x.py", source)
    assert place.here is not None and place.here.code == code
    assert remark in str(place.here) and bool(remark) == bool(place.here.remarks)


def test_autograd_functions_are_replaced() -> None:
    source = "from liger_kernel.ops import LigerSiLUMulFunction as F\nF.apply(a, b)\n"
    assert uses(source) == ["liger_ops.swiglu(gate=a, up=b)"]


def test_two_packages_have_functions_of_one_name() -> None:
    heads = [
        table.find(f"liger_kernel.{package}.LigerFusedLinearJSDFunction")
        for package in ("ops", "chunked_loss.jsd_loss")
    ]
    assert [head and head.package for head in heads] == ["ops", "chunked_loss"]


@pytest.mark.parametrize(
    ("source", "is_on"),
    [
        ("TrainingArguments(use_liger_kernel=True)", True),
        ("TrainingArguments(use_liger_kernel=wanted)", True),
        ("TrainingArguments(use_liger_kernel=False)", False),
        ("TrainingArguments(**{'use_liger_kernel': True, 'bf16': True})", True),
        ("options = {'use_liger_kernel': False}", False),
        ("options = dict(use_liger_kernel=True)", True),
        ("options['use_liger_kernel'] = True", True),
        ("options['use_liger_kernel'] = False", False),
        ("args.use_liger_kernel = True", True),
        ("args.use_liger_kernel = False", False),
        ("if args.use_liger_kernel: pass", True),
        ("def train(use_liger_kernel=False): pass", True),
        ("class Arguments:\n    use_liger_kernel: bool = False", True),
        ("run(['--use-liger-kernel'])", True),
        ("run(['--use_liger_kernel=false'])", False),
    ],
)
def test_settings_in_python(source: str, is_on: bool) -> None:
    (place,) = in_python("x.py", source)
    assert place.here is not None and (place.here.code == "liger_ops.fuse(model)") == is_on
    assert is_on or "remove it: it is off" in str(place)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("use_liger_kernel: true", "liger_ops.fuse(model)"),
        ('  "use_liger_kernel": true,', "liger_ops.fuse(model)"),
        ("use_liger_kernel = true", "liger_ops.fuse(model)"),
        ("python train.py --use_liger_kernel True", "liger_ops.fuse(model)"),
        ("python train.py --use-liger-kernel \\", "liger_ops.fuse(model)"),
        ("verl actor.model.use_liger=True", "liger_ops.fuse(model)"),
        ("enable_liger_kernel: true  # faster", "liger_ops.fuse(model)"),
        ("  - axolotl.integrations.liger.LigerPlugin", "liger_ops.fuse(model)"),
        ("liger_rope: true", "liger_ops.fuse(model, rope=True)"),
        ("liger-kernel>=0.5", "liger_ops"),
        ('dependencies = ["liger_kernel==0.8.5"]', "liger_ops"),
        ("LIGER_KERNEL_IMPL=cutile python train.py", ""),
        ("use_liger_kernel: false", ""),
        ('"use_liger_kernel": "false"', ""),
    ],
)
def test_settings_in_lines(text: str, code: str) -> None:
    (place,) = in_lines("x", f"first: 1\n{text}\n")
    assert place.line == 2 and place.here is not None and place.here.code == code


@pytest.mark.parametrize(
    "text", ["# use_liger_kernel: true", "a: 1  # use_liger_kernel", "my_use_liger_kernel: true",
             "path: data/liger-kernel/train.json", "liger: yes"]
)  # fmt: skip
def test_other_lines_are_not_found(text: str) -> None:
    assert in_lines("x", text) == []


def test_a_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file is read, in order, and one that cannot be parsed does not end the run."""
    files = {
        "a.py": "from liger_kernel.transformers import LigerRMSNorm\nn = LigerRMSNorm(\n    8\n)\n",
        "b/broken.py": "x = 1\ndef f(:\n",
        "b/bytes.yaml": b"\xff\xfe",
        "b/null.py": b"x = 1\0\n",
        "c.yaml": "use_liger_kernel: true\n",
        "d/latin.py": "# -*- coding: latin-1 -*-\nx = 'é'\n".encode("latin-1"),
        "notes.md": "use_liger_kernel: true\n",
        "requirements-gpu.txt": "liger-kernel\n",
        ".venv/lib/x.py": "import liger_kernel\n",
        "z.py": 'x = "\\d"\nimport liger_kernel\n',
    }
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert command.main([str(tmp_path), str(tmp_path / "a.py"), str(tmp_path / "notes.md")]) == 0
    output, errors = capsys.readouterr()
    lines = output.replace(f"{tmp_path}/", "").splitlines()
    assert errors == "" and before == {file: file.read_bytes() for file in before}
    assert [line.partition("  # ")[0] for line in lines] == [
        "a.py:1: from liger_kernel.transformers import LigerRMSNorm -> import liger_ops",
        f"a.py:2: LigerRMSNorm(8) -> {NORM}",
        "c.yaml:1: use_liger_kernel: true -> liger_ops.fuse(model)",
        "requirements-gpu.txt:1: liger-kernel -> liger_ops",
        "z.py:2: import liger_kernel -> import liger_ops",
        "b/broken.py:2: not read: SyntaxError: invalid syntax",
        lines[6],
        lines[7],
        lines[8],
        "5 places in 4 of 5 files that were read; 4 could not be read",
    ]
    assert lines[6].startswith("b/bytes.yaml: not read: UnicodeDecodeError: ")
    assert lines[7].startswith("b/null.py") and "null bytes" in lines[7]
    assert lines[8].startswith("notes.md: not read: it is none of .py ")


def test_nothing_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text("import torch\n")
    assert command.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "0 places in 0 of 1 files that were read\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [([], "required: PATH"), (["nowhere", "no.py"], "no such file or folder: nowhere, no.py"),
     (["--write", "."], "unrecognized arguments: --write")],
)  # fmt: skip
def test_wrong_arguments(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2 and text in capsys.readouterr().err


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from liger_kernel.megatron import LigerMegatronRMSNorm\n")
    done = subprocess.run(
        [sys.executable, "-m", "liger_ops.migrate", "a.py"], cwd=tmp_path, capture_output=True,
        text=True, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines()[0].startswith("a.py:1: from liger_kernel.megatron import ")


def test_the_readers_import_the_standard_library_alone() -> None:
    """They read text: neither Liger-Kernel nor torch is needed for it."""
    for file in (ROOT / "liger_ops" / "migrate").glob("*.py"):
        module = f"liger_ops.migrate.{file.stem}"
        names = [*imported_modules(ast.parse(file.read_text()), module, file.stem == "__init__")]
        others = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
        assert others <= {"liger_ops"}
        assert all(n.startswith("liger_ops.migrate") for n in names if n.startswith("liger_ops"))
