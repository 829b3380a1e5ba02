"""The loss of a causal language model, fused with its head by `fuse`."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import liger_ops.lowering.npu  # noqa: F401
import simulated_npu
from families import EXPERTS, FAMILIES, VOCABULARY, Family, text
from graphs import Recorder, liger_ops_of
from liger_ops.fusion import FuseReport, fuse, loss, unfuse

LLAMA = FAMILIES[0]
CAUSAL = [
    *[family for family in FAMILIES if family.name not in ("Bert", "ViT", "diffusion", "GptOss")],
    text("GptOss", 5, num_local_experts=4, output_router_logits=True, **EXPERTS),
    text("Gemma2", 9, final_logit_softcapping=2.0),
    text("Granite", 5, logits_scaling=12.0),
    text("Cohere", 5, logit_scale=0.25),
]
OPTIONS = {
    "Gemma2": {"logit_scale": 1.0, "softcap": 2.0},
    "Granite": {"logit_scale": pytest.approx(1 / 12), "softcap": None},
    "Cohere": {"logit_scale": 0.25, "softcap": None},
}
FAMILY = pytest.mark.parametrize("family", CAUSAL, ids=lambda family: family.name)


def with_fused_loss(model: nn.Module) -> nn.Module:
    """A copy of the model, of which nothing but the loss is fused."""
    copied = copy.deepcopy(model)
    entries, left = loss.fuse(copied)
    assert [entry.op for entry in entries] == ["linear_cross_entropy"]
    assert not left
    return copied


def pair(family: Family = LLAMA) -> tuple[nn.Module, nn.Module]:
    model = family.model()
    return model, with_fused_loss(model)


def batch(rows: int = 2, columns: int = 7) -> dict[str, Tensor]:
    """Token ids and labels, of which some are ignored."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(1, VOCABULARY, (rows, columns), generator=generator)
    labels = torch.randint(1, VOCABULARY, (rows, columns), generator=generator)
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module, value: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    value.sum().backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad for name, grad in named.items() if grad is not None}


def assert_same_gradients(
    actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-5
) -> None:
    """Relative, as norms over tensors, or to a thousandth of the gradient of the whole model."""
    assert actual.keys() == expected.keys()
    whole = torch.stack([grad.norm() for grad in expected.values()]).norm()
    assert whole > 0
    for name, grad in expected.items():
        error = (actual[name] - grad).norm() / max(grad.norm(), 1e-3 * whole)
        assert error <= bound, f"{name}: {error:.1e}"


def assert_trains_alike(fused: nn.Module, model: nn.Module, **inputs: Any) -> Any:
    """The loss and all gradients are equal but for rounding, and there are no logits."""
    expected = model(**inputs)
    actual = fused(**inputs)
    assert actual.logits is None
    assert expected.logits is not None
    assert actual.loss.shape == expected.loss.shape
    assert actual.loss.dtype is expected.loss.dtype
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-6, atol=1e-6)
    assert_same_gradients(gradients(fused, actual.loss), gradients(model, expected.loss))
    return actual


# Families


@FAMILY
def test_trains_as_before(family: Family) -> None:
    model = family.model()
    fused = copy.deepcopy(model)
    report = fuse(fused)
    (entry,) = [entry for entry in report.fused if entry.kind == "loss"]
    assert (entry.name, entry.class_name) == ("", type(model).__name__)
    assert entry.op == "linear_cross_entropy"
    assert entry.options == OPTIONS.get(family.name, {"logit_scale": 1.0, "softcap": None})
    assert "1 loss" in str(report)
    output = assert_trains_alike(fused, model, **batch())
    assert ("aux_loss" in output) == (family.name == "GptOss")


@FAMILY
def test_evaluation_is_as_before(family: Family) -> None:
    """Bit for bit, and so is training where no labels are given."""
    model, fused = pair(family)
    inputs = batch()
    ids = {"input_ids": inputs["input_ids"]}
    assert_same_output(fused(**ids), model(**ids))
    model.eval(), fused.eval()
    assert_same_output(fused(**ids), model(**ids))
    assert_same_output(fused(**inputs), model(**inputs))


def assert_same_output(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    assert list(actual) == list(expected)
    assert torch.equal(actual.logits, expected.logits)
    if expected.loss is not None:
        assert torch.equal(actual.loss, expected.loss)


@FAMILY
def test_unfuse_restores_the_model(family: Family) -> None:
    model = family.model()
    cls, inputs = type(model), batch()
    expected = model(**inputs)
    loss.fuse(model)
    assert type(model) is not cls
    assert unfuse(model) == 1
    assert type(model) is cls
    assert_same_output(model(**inputs), expected)


@pytest.mark.parametrize(
    "family",
    [
        text("Llama", 3, num_hidden_layers=1),
        text("Gemma2", 5, num_hidden_layers=1, final_logit_softcapping=2.0),
    ],
    ids=lambda family: family.name,
)
def test_compiles_whole(family: Family) -> None:
    """One graph for every size of batch, with the op's parts in it and no logits."""
    model, fused = pair(family)
    torch._dynamo.reset()
    recorder = Recorder()
    compiled = torch.compile(fused, fullgraph=True, dynamic=True, backend=recorder.backend())
    for inputs in (batch(), batch(3, 11)):
        expected = model(**inputs)
        actual = compiled(**inputs)
        assert actual.logits is None
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-6, atol=1e-6)
        assert_same_gradients(
            gradients(fused, actual.loss), gradients(model, expected.loss), bound=1e-4
        )
    assert len(recorder.forwards) == len(recorder.backwards) == 1
    assert liger_ops_of(recorder.forwards) == {"linear_cross_entropy_forward": 1}
    for graph in recorder.forwards + recorder.backwards:
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and VOCABULARY in value.shape:
                # Weights of the head and the embedding, and their gradients.
                assert sorted(value.shape) == [32, VOCABULARY], f"{node}: {tuple(value.shape)}"


def test_dynamo_sees_one_op() -> None:
    _, fused = pair(text("Llama", 3, num_hidden_layers=1))
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend=keep)
    assert compiled(**batch(), skip_logits=True).logits is None
    assert liger_ops_of(graphs) == {"linear_cross_entropy": 1}
    assert compiled(**batch(), skip_logits=False).logits is not None
    assert liger_ops_of(graphs[1:]) == {}


def test_on_the_simulated_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_npu, "active", True)
    model, fused = pair(text("Llama", 3, num_hidden_layers=1))
    expected = model(**batch(), num_items_in_batch=11)
    expected_gradients = gradients(model, expected.loss)
    simulated_npu.forget()
    fused.to("npu")
    inputs = {name: simulated_npu.to_npu(value) for name, value in batch().items()}
    output = fused(**inputs, num_items_in_batch=11)
    assert output.logits is None
    actual = gradients(fused, output.loss)
    modules = {name.rpartition(".")[0] for name in simulated_npu.launched}
    simulated_npu.forget()
    assert modules == {"liger_ops.lowering.npu.cross_entropy"}
    torch.testing.assert_close(simulated_npu.to_cpu(output.loss), expected.loss)
    on_cpu = {name: simulated_npu.to_cpu(grad) for name, grad in actual.items()}
    assert_same_gradients(on_cpu, expected_gradients, bound=1e-4)


# Ways to ask for the loss


WAYS: dict[str, dict[str, Any]] = {
    "tensor of a count": {"num_items_in_batch": torch.tensor(9)},
    "count": {"num_items_in_batch": 9},
    "count of a replica": {"num_items_in_batch": torch.tensor([[9]])},
    "float count": {"num_items_in_batch": torch.tensor(9.0)},
    "shifted labels": {"shift_labels": batch(3)["labels"][1:]},
    "another index ignored": {
        "ignore_index": 5,
        "labels": torch.where(batch()["labels"] < 20, 5, batch()["labels"]),
    },
    "the empty logits_to_keep": {"logits_to_keep": 0},
    "hidden states": {"output_hidden_states": True},
    "skip_logits": {"skip_logits": True},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("family", [LLAMA, CAUSAL[-3]], ids=lambda family: family.name)
def test_ways_to_ask(family: Family, way: dict[str, Any]) -> None:
    model, fused = pair(family)
    output = assert_trains_alike(fused, model, **{**batch(), **way})
    assert ("hidden_states" in output) == ("output_hidden_states" in way)


def test_what_is_returned() -> None:
    """As transformers has it for what is absent: None by name, and not counted by index."""
    model, fused = pair()
    output = fused(**batch(), output_hidden_states=True)
    assert type(output) is type(model(**batch()))
    assert output.logits is None
    assert list(output) == ["loss", "hidden_states"]
    assert output[0] is output.loss is output["loss"]
    assert output[1] is output.hidden_states
    values = fused(**batch(), output_hidden_states=True, return_dict=False)
    assert [type(value) for value in values] == [Tensor, tuple]
    assert torch.equal(values[0], output.loss)


def test_labels_by_position() -> None:
    model, fused = pair()
    names = list(inspect.signature(model.forward).parameters)
    given = batch()
    inputs = [given.get(name) for name in names[: names.index("labels") + 1]]
    output = fused(*inputs)
    assert output.logits is None
    torch.testing.assert_close(output.loss, model(*inputs).loss)


def test_skip_logits_false_gives_logits() -> None:
    model, fused = pair()
    assert_same_output(fused(**batch(), skip_logits=False), model(**batch()))


def test_skip_logits_in_evaluation() -> None:
    model, fused = pair()
    output = fused.eval()(**batch(), skip_logits=True)
    assert output.logits is None
    torch.testing.assert_close(output.loss, model.eval()(**batch()).loss)


@pytest.mark.parametrize("keep", [3, torch.tensor([1, 4])], ids=["count", "positions"])
def test_logits_to_keep(keep: Any) -> None:
    model, fused = pair()
    labels = batch()["labels"][:, : 3 if isinstance(keep, int) else 2]
    inputs = {**batch(), "labels": labels, "logits_to_keep": keep}
    assert_same_output(fused(**inputs), model(**inputs))
    with pytest.raises(ValueError, match="skip_logits=True and logits_to_keep were given"):
        fused(**inputs, skip_logits=True)


def test_skip_logits_without_labels() -> None:
    _, fused = pair()
    with pytest.raises(ValueError, match="LlamaForCausalLM: skip_logits=True and no labels"):
        fused(batch()["input_ids"], skip_logits=True)


def test_no_gradients() -> None:
    model, fused = pair()
    with torch.no_grad():
        output = fused(**batch())
    assert output.logits is None
    assert not output.loss.requires_grad
    torch.testing.assert_close(output.loss, model(**batch()).loss)


def test_second_backward_accumulates() -> None:
    model, fused = pair()
    for one in (model, fused):
        one(**batch()).loss.backward()
        one(**batch(3, 5)).loss.backward()
    grads = [{name: p.grad for name, p in one.named_parameters()} for one in (fused, model)]
    assert_same_gradients(*grads)


@pytest.mark.parametrize("use", ["bfloat16", "autocast"])
def test_lower_precision_is_as_near_to_truth(use: str) -> None:
    """Loss and gradients, against the untouched model in float64 with the same weights."""
    model = LLAMA.model()
    if use == "bfloat16":
        model.bfloat16()
    truth, fused = copy.deepcopy(model).double(), with_fused_loss(model)
    values, grads = [], []
    for one in (fused, model, truth):
        with torch.autocast("cpu", torch.bfloat16, enabled=use == "autocast" and one is not truth):
            value = one(**batch()).loss
        values.append(value)
        grads.append(gradients(one, value))
    assert values[0].dtype is torch.float32
    after, before = ((value.double() - values[2]).abs() for value in values[:2])
    assert after <= 2 * before + 1e-3 * values[2]
    whole = torch.stack([grad.norm() for grad in grads[2].values()]).norm()
    for name, true in grads[2].items():
        after, before = ((grad[name].double() - true).norm() for grad in grads[:2])
        assert after <= 2 * before + 2**-7 * max(true.norm(), 1e-3 * whole), name


# Weights


def test_tied_weights_stay_tied() -> None:
    model, fused = pair(text("Llama", 5, tie_word_embeddings=True))
    assert fused.lm_head.weight is fused.model.embed_tokens.weight
    assert_trains_alike(fused, model, **batch())


def test_bias_of_the_head() -> None:
    model = LLAMA.model()
    model.lm_head = nn.Linear(32, VOCABULARY)
    output = assert_trains_alike(with_fused_loss(model), model, **batch())
    assert output.loss.isfinite()


@pytest.mark.parametrize("trained", ["lm_head", "model", "lm_head.bias"])
def test_frozen_weights(trained: str) -> None:
    model = LLAMA.model()
    model.lm_head = nn.Linear(32, VOCABULARY)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    fused = with_fused_loss(model)
    assert_trains_alike(fused, model, **batch())
    names = {name for name, p in fused.named_parameters() if p.grad is not None}
    assert names == {name for name, _ in model.named_parameters() if name.startswith(trained)}


def test_parameters_and_state_dict_are_the_same() -> None:
    model = LLAMA.model()
    parameters, state = dict(model.named_parameters()), model.state_dict()
    fuse(model)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == list(state)
    assert type(model.lm_head) is nn.Linear
    assert model.get_output_embeddings() is model.lm_head


def test_resized_vocabulary() -> None:
    model, fused = pair()
    for one in (model, fused):
        one.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
    fused.load_state_dict(model.state_dict())
    assert_trains_alike(fused, model, **batch())


# What the rest of the world does with models


def test_signature_and_name_are_those_of_the_class() -> None:
    model, fused = pair()
    assert inspect.signature(fused.forward) == inspect.signature(model.forward)
    assert type(fused).__name__ == type(model).__name__
    assert isinstance(fused, type(model))


def test_gradient_checkpointing() -> None:
    model, fused = pair()
    for one in (model, fused):
        one.gradient_checkpointing_enable({"use_reentrant": False})
    assert_trains_alike(fused, model, **batch())


def test_checkpointed_as_a_whole() -> None:
    model, fused = pair()

    def value(**inputs: Any) -> Tensor:
        return fused(**inputs).loss

    actual = torch.utils.checkpoint.checkpoint(value, **batch(), use_reentrant=False)
    expected = model(**batch()).loss
    assert_same_gradients(gradients(fused, actual), gradients(model, expected))


def test_deepcopy_and_pickle() -> None:
    model, fused = pair()
    for copied in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert_trains_alike(copied, model, **batch())
        assert unfuse(copied) == 1
        assert_same_output(copied(**batch()), model(**batch()))
    assert fused(**batch()).logits is None


def test_save_pretrained(tmp_path: Path) -> None:
    model, fused = pair()
    fused.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    ).train()
    assert type(loaded) is type(model)
    assert_same_output(loaded(**batch()), model(**batch()))
    assert_trains_alike(with_fused_loss(loaded), model, **batch())


def test_generate() -> None:
    model, fused = pair()
    ids = batch()["input_ids"]
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    model.eval(), fused.eval()
    assert torch.equal(fused.generate(ids, **options), model.generate(ids, **options))


def test_only_the_given_model_changes() -> None:
    one, other = LLAMA.model(), LLAMA.model()
    cls = type(other)
    forward, loss_function = cls.forward, other.loss_function
    expected = other(**batch())
    fuse(one)
    assert type(other) is cls
    assert cls.forward is forward
    assert other.loss_function is loss_function
    assert_same_output(other(**batch()), expected)
    assert one(**batch()).logits is None


def test_second_call_changes_nothing() -> None:
    model = LLAMA.model()
    fuse(model)
    cls = type(model)
    assert fuse(model) == FuseReport((), ())
    assert type(model) is cls


def test_two_models_share_a_class() -> None:
    """What torch.compile knows of the one holds for the other."""
    assert type(pair()[1]) is type(pair()[1])


def test_model_in_a_model() -> None:
    model = LLAMA.model()
    parent = nn.ModuleDict({"language": model})
    report = fuse(parent)
    assert [entry.name for entry in report.fused if entry.kind == "loss"] == ["language"]
    assert parent["language"](**batch()).logits is None
    unfuse(parent)
    assert parent["language"](**batch()).logits is not None


def test_model_made_on_meta() -> None:
    with torch.device("meta"):
        model = LLAMA.build()
    state, untouched = LLAMA.model().state_dict(), LLAMA.model()
    assert "loss" in {entry.kind for entry in fuse(model).fused}
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    model.model.rotary_emb.__init__(model.config)
    assert_trains_alike(model.train(), untouched, **batch())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {"vocab_size": 128256}),
        ("Cohere", {"vocab_size": 256000}),
        ("Gemma2", {"vocab_size": 262144, "final_logit_softcapping": 30.0}),
    ],
)
def test_large_vocabularies(name: str, options: dict[str, Any]) -> None:
    """Found in spite of the rounding of their sums. Only the probe's stand-in has memory."""
    with torch.device("meta"):
        model = text(name, 5, **options).build()
    entries, left = loss.fuse(model)
    assert not left
    assert entries[0].options["softcap"] == options.get("final_logit_softcapping")


def test_random_state_and_global_modes_are_kept() -> None:
    model = LLAMA.model()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.device("meta"):
        loss.fuse(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert_trains_alike(model, LLAMA.model(), **batch())


def test_threads_do_not_meet() -> None:
    """Calls of one model at once, each with its own hidden states and labels."""
    _, fused = pair()
    batches = [batch(rows, columns) for rows in (2, 3) for columns in (5, 6, 7, 8)]
    expected = [fused(**inputs).loss.item() for inputs in batches]
    actual: dict[int, list[float]] = {}

    def work(i: int) -> None:
        actual[i] = [fused(**batches[i]).loss.item() for _ in range(5)]

    threads = [Thread(target=work, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert actual == {i: [value] * 5 for i, value in enumerate(expected)}


def test_replica_of_data_parallel() -> None:
    """It shares its class with the model, and its head holds a plain tensor."""
    model, fused = pair()
    replica = fused._replicate_for_data_parallel()
    replica.lm_head = fused.lm_head._replicate_for_data_parallel()
    replica.lm_head.weight = fused.lm_head.weight * 2
    replica.lm_head._parameters["bias"] = None
    output = replica(**batch())
    assert output.logits is None
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    torch.testing.assert_close(output.loss, model(**batch()).loss)


def test_call_that_raises_leaves_nothing_behind() -> None:
    model, fused = pair()
    with pytest.raises(ValueError, match="linear_cross_entropy: target"):
        fused(input_ids=batch()["input_ids"], labels=batch(3)["labels"])
    assert_trains_alike(fused, model, **batch())


def test_forward_that_extends_another() -> None:
    class Extended(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_ids=input_ids, labels=labels, **kwargs)

    model = LLAMA.model()
    model.__class__ = Extended
    assert_trains_alike(with_fused_loss(model), model, **batch())


def test_attributes_that_forward_sets_reach_the_model() -> None:
    class Counting(Tiny):
        calls = 0

        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
            self.calls += 1
            return super_forward(self, input_ids, labels, **kwargs)

    super_forward = Tiny.forward
    model = Counting()
    model.calls = 5
    model = with_fused_loss(model)
    assert model(**batch())["loss"].isfinite()
    model(**batch())
    assert vars(model)["calls"] == 7


# Heads and losses that are no longer what they were


class LoraHead(nn.Module):
    """As peft wraps a linear layer: the layer inside, and its attributes outside."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.a = nn.Parameter(torch.linspace(-1, 1, 2 * 32).reshape(2, 32))
        self.b = nn.Parameter(torch.linspace(-1, 1, 2 * VOCABULARY).reshape(VOCABULARY, 2))

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + F.linear(F.linear(x, self.a), self.b)


class SavedHead(nn.Module):
    """As peft keeps a module that it trains whole: the original, and a copy in its place."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module)})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.modules_to_save["default"], name)

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_to_save["default"](x)


class QuantizedHead(nn.Linear):
    pass


class Strange(nn.Parameter):
    pass


def wrap(wrapper: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], None]:
    def change(model: Any) -> None:
        model.lm_head = wrapper(model.lm_head)

    return change


def quantized(head: nn.Module) -> nn.Module:
    head.__class__ = QuantizedHead
    return head


def hooked(head: nn.Module) -> nn.Module:
    head.register_forward_hook(lambda module, args, y: y * 2)
    return head


def with_own_forward(head: nn.Module) -> nn.Module:
    forward = head.forward
    head.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]
    return head


def with_strange_weight(head: Any) -> nn.Module:
    head.weight = Strange(head.weight.detach())
    return head


def compiled(head: nn.Module) -> nn.Module:
    head.compile(backend="eager")
    return head


CHANGED_HEADS = {
    "its head is a LoraHead, not a torch.nn.Linear": wrap(LoraHead),
    "its head is a SavedHead, not": wrap(SavedHead),
    "its head is a QuantizedHead, not": wrap(quantized),
    "its head has hooks": wrap(hooked),
    "its head has a forward of its own": wrap(with_own_forward),
    "its head holds a Strange, not a plain tensor": wrap(with_strange_weight),
    "its head is compiled by itself": wrap(compiled),
}
CHANGED_HEAD = pytest.mark.parametrize(
    ("reason", "change"), CHANGED_HEADS.items(), ids=[reason[12:30] for reason in CHANGED_HEADS]
)


@CHANGED_HEAD
def test_other_heads_are_left(reason: str, change: Callable[[nn.Module], None]) -> None:
    model, changed = LLAMA.model(), LLAMA.model()
    change(model), change(changed)
    entries, left = loss.fuse(changed)
    assert not entries
    assert [(entry.name, entry.class_name) for entry in left] == [("", "LlamaForCausalLM")]
    assert reason in left[0].reason
    assert_same_output(changed(**batch()), model(**batch()))


@CHANGED_HEAD
def test_heads_changed_after_fuse(reason: str, change: Callable[[nn.Module], None]) -> None:
    model, fused = pair()
    change(model), change(fused)
    assert_same_output(fused(**batch()), model(**batch()))


def test_adapted_body_with_a_plain_head() -> None:
    """As peft has it by default: everything frozen but the adapters."""
    model, fused = pair()
    for one in (model, fused):
        one.requires_grad_(False)
        attention = one.model.layers[0].self_attn
        attention.o_proj = Adapter(attention.o_proj)
    assert_trains_alike(fused, model, **batch())


class Adapter(nn.Module):
    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, base_layer.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) * self.scale


def test_loss_replaced_after_fuse() -> None:
    model, fused = pair()

    def unshifted(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        return F.cross_entropy(logits.float().view(-1, vocab_size), labels.view(-1))

    model.loss_function = fused.loss_function = unshifted
    assert_same_output(fused(**batch()), model(**batch()))


# Near misses


def causal_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
) -> Tensor:
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    value = F.cross_entropy(
        logits.float().reshape(-1, vocab_size),
        shift_labels.reshape(-1),
        ignore_index=ignore_index,
        reduction=reduction,
    )
    return value if num_items_in_batch is None else value / num_items_in_batch


class Tiny(nn.Module):
    """A causal language model that transformers does not know. The others here change one thing."""

    loss_function = staticmethod(causal_loss)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        hidden = self.body(input_ids)
        # What a stub for the body returns has states of several kinds.
        logits = self.logits(hidden if isinstance(hidden, Tensor) else hidden.last_hidden_state)
        if labels is None:
            return {"logits": logits}
        return self.result(self.loss_function(logits, labels, VOCABULARY, **kwargs), logits)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def result(self, value: Tensor, logits: Tensor) -> Any:
        return {"loss": value, "logits": logits}


def test_any_model_that_computes_it() -> None:
    model = Tiny()
    fused = with_fused_loss(model)
    output, expected = fused(**batch()), model(**batch())
    assert list(output) == ["loss"]
    torch.testing.assert_close(output["loss"], expected["loss"])
    assert_same_gradients(gradients(fused, output["loss"]), gradients(model, expected["loss"]))


class Unshifted(Tiny):
    @staticmethod
    def loss_function(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))


class Smoothed(Tiny):
    @staticmethod
    def loss_function(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
        return F.cross_entropy(logits.float().view(-1, vocab_size), labels, label_smoothing=0.1)


class NoCount(Tiny):
    @staticmethod
    def loss_function(
        logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **kw: Any
    ) -> Tensor:
        return causal_loss(logits, labels, vocab_size, **kw)


class NoIndex(Tiny):
    @staticmethod
    def loss_function(
        logits: Tensor, labels: Tensor, vocab_size: int, ignore_index: int = -100, **kw: Any
    ) -> Tensor:
        return causal_loss(logits, labels, vocab_size, **kw)


class LowPrecision(Tiny):
    @staticmethod
    def loss_function(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return causal_loss(logits, *args, **kwargs).to(logits.dtype)


class BoundLoss(Tiny):
    def loss_function(self, *args: Any, **kwargs: Any) -> Tensor:
        return causal_loss(*args, **kwargs)


class Penalised(Tiny):
    def result(self, value: Tensor, logits: Tensor) -> Any:
        return super().result(value + 1e-2 * logits.float().pow(2).sum(), logits)


class LogNormaliser(Tiny):
    def result(self, value: Tensor, logits: Tensor) -> Any:
        return {**super().result(value, logits), "lse": logits.float().logsumexp(-1)}


class Best(Tiny):
    def result(self, value: Tensor, logits: Tensor) -> Any:
        return {**super().result(value, logits), "best": logits.argmax(-1)}


class Doubled(Tiny):
    """Its loss is of other logits than those that it returns."""

    def result(self, value: Tensor, logits: Tensor) -> Any:
        return super().result(value, 2 * logits)


class Clamped(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).clamp(-50, 50)


class Shifted(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden) + 0.5


class Negative(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        return -self.head(hidden)


class Normalised(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).log_softmax(-1)


class Detached(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).detach()


class HalfDetached(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        half = 0.5 * self.head(hidden)
        return half + half.detach()


class OneLess(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)[:, :-1]


class Twice(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden) + self.head(hidden)


class ByItself(Tiny):
    """Computes the loss in forward, as the older models of transformers do."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.logits(self.body(input_ids).last_hidden_state)
        return {"loss": causal_loss(logits, labels, VOCABULARY), "logits": logits}


class LogitsMasked(Tiny):
    """The attention mask changes the logits of its loss."""

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, **kwargs: Any
    ) -> Any:
        self.mask = attention_mask
        return super().forward(input_ids, labels, **kwargs)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        return logits if self.mask is None else logits * self.mask.unsqueeze(-1)


class NotLinear(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(8, VOCABULARY), nn.Tanh())


class Deeper(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([self.head])
        del self.head

    def get_output_embeddings(self) -> nn.Module:
        return self.heads[0]


class OwnSkip(Tiny):
    def forward(self, input_ids: Tensor, labels: Any = None, skip_logits: bool = False) -> Any:
        return super().forward(input_ids, labels)


class NeedsMore(Tiny):
    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden) * self.body.weight.mean()


class Object(Tiny):
    def result(self, value: Tensor, logits: Tensor) -> Any:
        return copy.copy(nn.Identity())


class WithOwnForward(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.forward = self.forward  # type: ignore[method-assign]


class WithOwnLogits(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.logits = self.head.forward  # type: ignore[method-assign]


NOT_THIS_LOSS = "is not the cross-entropy of shifted labels"
NEAR_MISSES = {
    Unshifted: NOT_THIS_LOSS,
    Smoothed: NOT_THIS_LOSS,
    NoCount: f"its loss with num_items_in_batch {NOT_THIS_LOSS}",
    NoIndex: f"its loss with ignore_index {NOT_THIS_LOSS}",
    LowPrecision: "its loss is bfloat16 where the model is bfloat16",
    BoundLoss: "its loss_function is a method, not a function",
    Penalised: NOT_THIS_LOSS,
    LogNormaliser: "what its forward returns beside the loss depends on the logits",
    Best: "its forward needs the logits for more than the loss (IndexError",
    Doubled: "the logits of its loss are not those that it returns",
    Clamped: "its logits are not those of its head, scaled or capped",
    Shifted: "its logits are not those of its head",
    Negative: "its logits are not those of its head",
    Normalised: "its logits are not those of its head",
    Detached: "its loss has no gradient",
    HalfDetached: "its loss has another gradient",
    OneLess: "fails on the CPU with a stub for the body",
    Twice: "for labels its forward calls its head 2 times, and its loss_function 1 times",
    ByItself: "for labels its forward calls its head 1 times, and its loss_function 0 times",
    NotLinear: "its head is a Sequential, not a torch.nn.Linear",
    LogitsMasked: f"its loss with attention_mask {NOT_THIS_LOSS}",
    OwnSkip: "its forward has a skip_logits of its own",
    Object: "its forward returns a Identity, neither a tuple nor a dict",
    WithOwnForward: "the instance has a forward of its own",
    WithOwnLogits: "the instance has a logits of its own",
}


@pytest.mark.parametrize(
    ("cls", "reason"), NEAR_MISSES.items(), ids=[cls.__name__ for cls in NEAR_MISSES]
)
def test_near_miss_is_left_with_the_reason(cls: type[Tiny], reason: str) -> None:
    model = cls()
    report = fuse(model)
    assert not report
    assert type(model) is cls
    assert [(entry.name, entry.class_name) for entry in report.left] == [("", cls.__name__)]
    assert reason in report.left[0].reason


def test_head_that_is_no_child_is_reported_of_causal_models_alone() -> None:
    class DeeperCausalLM(Deeper):
        pass

    assert not fuse(Deeper()).left
    assert "its head is not a child of it" in fuse(DeeperCausalLM()).left[0].reason


def test_models_of_other_tasks_are_not_reported() -> None:
    for family in FAMILIES[-3:]:
        entries, left = loss.fuse(family.model())
        assert not entries
        assert not left


def test_loss_that_forward_stops_computing_is_an_error() -> None:
    class Sometimes(Tiny):
        def forward(self, input_ids: Tensor, labels: Any = None, mode: str = "loss") -> Any:
            if mode == "loss":
                return super().forward(input_ids, labels)
            return {"logits": self.logits(self.body(input_ids))}

    model = with_fused_loss(Sometimes())
    with pytest.raises(RuntimeError, match="forward did not call loss_function for labels"):
        model(**batch(), mode="logits")
    assert list(model(**batch(), mode="logits", skip_logits=False)) == ["logits"]
