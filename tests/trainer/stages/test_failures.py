"""What is expected to go wrong ends a stage with a closed reason and a sentence that says what to write."""

import json
import shutil

import pytest

from osprey_api.conditions import FailureReason
from osprey_api.stages import DataToResolve, Pinned


@pytest.fixture
def refused(machine):
    def run(task, reason, *words):
        code, outcome = machine.run(task)
        assert outcome.failure is reason, outcome.message
        assert code != 0
        for word in words:
            assert word in outcome.message
        assert outcome.artifact is None
        assert outcome.result is None

    return run


@pytest.fixture
def data(claims, request):
    """Writes a file of rows on a claim, and returns its URI."""

    def write(*lines: str) -> str:
        name = f"{abs(hash(request.node.name))}.jsonl"
        (claims / "data" / name).write_text("".join(f"{line}\n" for line in lines))
        return f"pvc://data/{name}"

    return write


def source_with(claims, name, **config):
    """A copy of the source model with another config."""
    folder = claims / "models" / name
    shutil.copytree(claims / "models" / "source", folder, dirs_exist_ok=True)
    fields = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(fields))
    return Pinned(uri=f"pvc://models/{name}")


@pytest.fixture
def prepared(machine, greedy_answers):
    """Machine, initial drafter and answers."""
    answers = machine.answers(greedy_answers)
    pruned = machine.done(machine.prune()).artifact
    return pruned, machine.done(machine.convert(answers, backbone=pruned)).artifact, answers


def to_resolve(uri, field="text"):
    return (DataToResolve(name="text", uri=uri, kind="Text", field=field),)


def test_a_model_that_is_not_there(machine, refused):
    refused(machine.resolve(model=Pinned(uri="pvc://models/nothing")), FailureReason.SOURCE_NOT_FOUND, "nothing")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a"', ("line 2",)),
        ('{"prompt": "a"}', ("line 2", "'text'", "prompt")),
        ('{"text": ["a"]}', ("line 2", "'text'", "list")),
        ("[1]", ("line 2", "object")),
    ],
)
def test_too_many_broken_rows_end_resolve_with_file_and_line(machine, refused, data, line, words):
    uri = data('{"text": "good"}', line)
    refused(machine.resolve(data=to_resolve(uri)), FailureReason.INVALID_DATA, uri, *words)


def test_a_backbone_of_another_architecture_is_refused_by_name(machine, refused, claims):
    other = source_with(claims, "granite", architectures=["GraniteForCausalLM"], model_type="granite")
    refused(machine.resolve(model=other), FailureReason.UNSUPPORTED_MODEL, "GraniteForCausalLM", "LlamaForCausalLM")
    machine.done(machine.resolve(model=other, data=(), resource="ospreydrafter/owl"))
    refused(machine.prune(source=other), FailureReason.UNSUPPORTED_MODEL, "'granite'")


def test_a_target_that_is_no_language_model_is_refused_by_name(machine, refused, claims):
    other = source_with(claims, "bert", architectures=["BertForMaskedLM"])
    task = machine.resolve(model=other, resource="ospreydrafter/owl")
    refused(task, FailureReason.UNSUPPORTED_MODEL, "BertForMaskedLM")


def test_a_quantised_target_is_refused_by_name_unless_only_sglang_is_to_run_it(machine, refused, claims):
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    packed = {"model": source_with(claims, "packed", quantization_config=awq), "resource": "ospreydrafter/owl"}
    refused(machine.resolve(**packed), FailureReason.UNSUPPORTED_MODEL, "quantised (awq)", "in floating point")
    assert machine.done(machine.resolve(**packed, teaches=False)).result.facts.hidden_size == 32


def test_more_layers_than_the_source_has(machine, refused):
    refused(machine.prune(layers=5), FailureReason.INVALID_CONFIG, "5", "4")


def test_data_that_changed_since_it_was_resolved(machine, refused, data):
    uri = data('{"text": "one"}')
    source = machine.done(machine.resolve(data=to_resolve(uri))).result.data[0].source
    data('{"text": "two"}')
    refused(machine.tokenize(text=source), FailureReason.INVALID_DATA, uri, "changed")


def test_text_without_text(machine, refused, data):
    uri = data('{"text": ""}')
    refused(machine.tokenize(text=Pinned(uri=uri)), FailureReason.INVALID_DATA, uri, "none of 1 rows", "BlankText")


def test_a_source_without_an_end_token(machine, refused, claims):
    other = source_with(claims, "endless")
    path = claims / "models" / "endless" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": None}))
    refused(machine.tokenize(tokenizer=other), FailureReason.UNSUPPORTED_MODEL, "eos_token")


def test_text_shorter_than_a_window(machine, refused, data):
    pruned = machine.done(machine.prune()).artifact
    tokens = machine.done(machine.tokenize(text=Pinned(uri=data('{"text": "short"}')))).artifact
    refused(machine.pretrain(pruned, tokens), FailureReason.INVALID_DATA, "sequenceLength")


def test_text_of_another_tokenizer(machine, refused):
    pruned = machine.done(machine.prune()).artifact
    tokens = machine.done(machine.tokenize(tokenizer=Pinned(uri="pvc://models/target"))).artifact
    refused(machine.pretrain(pruned, tokens), FailureReason.INVALID_CONFIG, "319", "304")


def test_no_supervised_token_ends_before_training(machine, refused, prepared):
    _, initial, _ = prepared
    answers = machine.answers([{"domain": "owls", "prompt_ids": [5, 6], "answer_ids": [7], "finish": "length"}])
    refused(machine.distil(initial, answers), FailureReason.INVALID_DATA, "too short 1")


def test_answers_outside_the_draft_vocabulary_end_before_training(machine, refused, prepared):
    _, _, answers = prepared
    small = machine.done(machine.convert(answers, draft_vocab_size=16)).artifact
    line = {"domain": "owls", "prompt_ids": [5, 6], "answer_ids": [319, 319, 319], "finish": "length"}
    refused(machine.distil(small, machine.answers([line])), FailureReason.INVALID_DATA, "16 tokens")


def test_a_sequence_that_memory_cannot_hold_ends_before_the_target_is_loaded(machine, refused, prepared, monkeypatch):
    _, initial, _ = prepared
    monkeypatch.setattr("osprey_trainer.memory.device_bytes", lambda _device: 8 << 20)
    monkeypatch.setattr("osprey_trainer.stages.distil.Target", None)
    line = {"domain": "owls", "prompt_ids": [5, 6], "answer_ids": [9] * 1500, "finish": "length"}
    task = machine.distil(initial, machine.answers([line]), sequence_length=4096)
    refused(task, FailureReason.INVALID_CONFIG, "a dialogue of 1502 tokens", "lower distillation.sequenceLength")


def test_a_drafter_of_another_target(machine, refused, prepared):
    _, initial, answers = prepared
    task = machine.distil(initial, answers, target=Pinned(uri="pvc://models/source"))
    refused(task, FailureReason.INVALID_CONFIG, "328", "304")


def test_a_loss_that_is_not_finite(machine, refused, prepared):
    _, initial, answers = prepared
    refused(machine.distil(initial, answers, learning_rate=1e30, clip_norm=1e30), FailureReason.DIVERGED, "step")
