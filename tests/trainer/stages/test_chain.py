"""The chain of stages on one machine, each run as in its pod, on tiny models with random weights."""

import json
import logging
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from osprey_api.stages import ArtifactRef, DataToResolve, Pinned
from osprey_trainer.models.backbone import Backbone
from osprey_trainer.models.draft import Arrangement, Drafter
from osprey_trainer.training import COST_LINE
from osprey_trainer.vocabulary import TokenTable


def load(folder):
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def chain(tmp_path_factory, greedy_answers, machine_of):
    """All stages, once: task and outcome of each."""
    machine = machine_of(tmp_path_factory.mktemp("chain"))
    done = {}

    def run(name, task):
        done[name] = (task, machine.done(task))
        return done[name][1].artifact

    run("resolve", machine.resolve())
    resolved = done["resolve"][1].result
    pinned = {"source": resolved.model, "text": resolved.data[0].source}
    answers = machine.answers(greedy_answers)
    pruned = run("prune", machine.prune(source=pinned["source"]))
    tokens = run("tokenize", machine.tokenize(tokenizer=pinned["source"], text=pinned["text"]))
    backbone = run("pretrain", machine.pretrain(pruned, tokens))
    initial = run("convert", machine.convert(answers, backbone=backbone))
    states = run("capture", machine.capture(answers))
    run("distil", machine.distil(initial, answers, states=states, epochs=8))
    return machine, done


@pytest.fixture
def outcome(chain):
    return lambda stage: chain[1][stage][1]


@pytest.fixture
def folder(chain):
    return lambda stage: chain[0].files(chain[1][stage][1].artifact)


def test_resolve_pins_model_and_data(outcome):
    resolved = outcome("resolve")
    assert resolved.artifact is None
    assert resolved.result.model.digest.startswith("sha256:")
    assert resolved.result.facts.architecture == "LlamaForCausalLM"
    assert (resolved.result.facts.layers, resolved.result.facts.vocab_size) == (4, 304)
    (text,) = resolved.result.data
    assert (text.name, text.rows) == ("text", 200)
    assert text.source.digest.startswith("sha256:")


def test_prune_keeps_the_first_blocks_of_a_usable_model(outcome, folder, claims):
    source, pruned = load(claims / "models" / "source"), load(folder("prune"))
    source.model.layers = source.model.layers[:2]
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        assert torch.equal(pruned(ids).logits, source(ids, use_cache=False).logits)
    assert pruned.config.tie_word_embeddings
    assert outcome("prune").result.parameters == sum(p.numel() for p in pruned.parameters())
    text = "the owl waits"
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (folder("prune"), claims / "models" / "source")]
    assert tokenizers[0](text) == tokenizers[1](text)


def test_tokenize_writes_every_document_and_its_end(outcome, folder, claims):
    tokenizer = AutoTokenizer.from_pretrained(claims / "models" / "source")
    expected = []
    for line in (claims / "data" / "text.jsonl").read_text().splitlines():
        expected += [*tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"], 2]
    index = json.loads((folder("tokenize") / "index.json").read_text())
    assert index["dtype"] == "uint16"
    assert np.fromfile(folder("tokenize") / "shard-00000.bin", "<u2").tolist() == expected
    assert (outcome("tokenize").result.rows, outcome("tokenize").result.tokens) == (200, len(expected))


def test_pretrain_restores_the_backbone(outcome, folder):
    result = outcome("pretrain").result
    assert (result.steps, result.tokens) == (20, 20 * 4 * 48)
    assert result.final_loss < result.first_loss - 0.5
    pruned, backbone = Backbone.load(folder("prune")), Backbone.load(folder("pretrain"))
    assert backbone.hf_config["num_hidden_layers"] == 2
    assert not torch.equal(pruned.norm.weight, backbone.norm.weight)
    assert {path.name for path in folder("prune").iterdir()} < {path.name for path in folder("pretrain").iterdir()}
    load(folder("pretrain"))


def test_pretrain_may_keep_the_embedding_and_predict_frequent_tokens_only(chain, folder):
    machine, done = chain
    pruned, tokens = (done[stage][1].artifact for stage in ("prune", "tokenize"))
    result = machine.done(machine.pretrain(pruned, tokens, loss_vocab_size=64, freeze=True))
    before, after = Backbone.load(folder("prune")), Backbone.load(machine.files(result.artifact))
    assert torch.equal(before.embed_tokens.weight, after.embed_tokens.weight)
    assert not torch.equal(before.norm.weight, after.norm.weight)
    assert result.result.final_loss < result.result.first_loss < done["pretrain"][1].result.first_loss


def test_convert_makes_the_initial_drafter(outcome, folder, greedy_answers, claims):
    result = outcome("convert").result
    drafter = Drafter.load(folder("convert"))
    backbone = Backbone.load(folder("pretrain"))
    assert drafter.config.arrangement is Arrangement.OSPREY
    assert (drafter.config.vocab_size, drafter.config.draft_vocab_size) == (328, 100)
    assert drafter.config.tapped_layers == (3, 4, 5)
    assert drafter.config.target_vocabulary == TokenTable.load(claims / "models" / "target").digest
    assert result.parameters == sum(p.numel() for p in drafter.parameters())
    assert result.rows_copied + result.rows_composed + result.rows_left == 320
    assert result.rows_composed > 0
    assert torch.equal(drafter.norm.weight, backbone.norm.weight)
    answered = [token for line in greedy_answers for token in line["answer_ids"]]
    held = set(drafter.draft_ids.tolist())
    assert result.coverage == pytest.approx(sum(token in held for token in answered) / len(answered))


def test_distil_trains_the_drafter(outcome, folder, greedy_answers):
    result = outcome("distil").result
    initial, drafter = Drafter.load(folder("convert")), Drafter.load(folder("distil"))
    assert result.steps == 8 * 24 // 4
    assert result.supervised_tokens == 8 * sum(len(line["answer_ids"]) for line in greedy_answers)
    assert result.final_loss < result.first_loss
    assert result.simulated_acceptance_length > 1.2
    assert drafter.config == initial.config
    assert torch.equal(drafter.d2t, initial.d2t)
    assert not torch.equal(drafter.fc.weight, initial.fc.weight)
    assert not torch.equal(drafter.embed_tokens.weight, initial.embed_tokens.weight)
    report = json.loads((folder("distil") / "training.json").read_text())
    assert report["config"]["unroll"] == 3
    assert report["dialogues"]["kept"] == 24
    assert len(report["losses"]) == result.steps
    assert report["losses"][-1] == [result.steps, result.final_loss]
    assert torch.__version__.startswith(report["versions"]["torch"])


def test_a_second_run_of_every_stage_is_reused(chain):
    machine, done = chain
    for name, (task, first) in done.items():
        again = machine.done(task)
        assert again.result == first.result, name
        assert again.artifact == first.artifact, name
        assert again.reused is (name != "resolve"), name


def test_a_drafter_from_scratch_has_the_targets_embedding(chain, claims, greedy_answers):
    machine, _ = chain
    # Nothing else of its weights is read.
    hollow = shutil.copytree(claims / "models" / "target", claims / "models" / "hollow") / "model.safetensors"
    save_file({"model.embed_tokens.weight": load_file(hollow)["model.embed_tokens.weight"]}, hollow)
    source = Pinned(uri="pvc://models/hollow")
    outcome = machine.done(machine.convert(machine.answers(greedy_answers), draft_vocab_size=None, target=source))
    drafter = Drafter.load(machine.files(outcome.artifact))
    assert drafter.config.arrangement is Arrangement.EAGLE3
    assert drafter.config.draft_vocab_size == 328
    assert outcome.result.coverage == 1.0
    target = load(claims / "models" / "target")
    assert torch.equal(drafter.embed_tokens.weight, target.model.embed_tokens.weight)
    trained = machine.done(machine.distil(outcome.artifact, machine.answers(greedy_answers)))
    assert trained.result.final_loss < trained.result.first_loss
    served = Drafter.load(machine.files(trained.artifact))
    assert torch.equal(served.embed_tokens.weight, target.model.embed_tokens.weight)  # SGLang shares the target's


def test_online_and_captured_states_train_alike(chain, greedy_answers, caplog):
    machine, done = chain
    caplog.set_level(logging.INFO)
    initial, answers = done["convert"][1].artifact, machine.answers(greedy_answers)
    online, captured = (
        machine.done(machine.distil(initial, answers, states=states, epochs=2)).result
        for states in (None, done["capture"][1].artifact)
    )
    assert online.final_loss == pytest.approx(captured.final_loss, rel=1e-3)
    assert online.simulated_acceptance_length == pytest.approx(captured.simulated_acceptance_length, rel=0.05)
    told = [entry.message.removeprefix(COST_LINE) for entry in caplog.records if entry.message.startswith(COST_LINE)]
    costs = [json.loads(line) for line in told]
    assert [cost["tokens"] for cost in costs] == [online.supervised_tokens, captured.supervised_tokens]
    assert costs[0]["TFLOP"] > costs[1]["TFLOP"] > 0  # the target's own
    assert all(0 < cost["MFU"] < 1 and 0 <= cost["waiting"] < 1 for cost in costs)
    assert all(cost["seconds_of_steps"] < cost["seconds"] for cost in costs)


def test_a_target_is_resolved_with_its_prompts(chain):
    machine, _ = chain
    prompts = DataToResolve(name="owls", uri="pvc://data/prompts.jsonl", kind="Prompts", field=None)
    task = machine.resolve(model=Pinned(uri="pvc://models/target"), data=(prompts,), resource="ospreydrafter/owl")
    result = machine.done(task).result
    assert result.facts.hidden_size == 24
    assert result.data[0].rows == 20


def test_a_released_backbone_is_imported_without_a_manifest(chain, folder, outcome):
    machine, done = chain
    shutil.copytree(folder("pretrain"), machine.root / "released")
    released = ArtifactRef(uri=f"file://{machine.root}/released", digest=outcome("pretrain").artifact.digest)
    answers = done["convert"][0].inputs["answers"]
    imported = machine.done(machine.convert(answers, draft_vocab_size=50, backbone=released)).result
    assert (imported.rows_copied, imported.rows_composed) == (
        outcome("convert").result.rows_copied,
        outcome("convert").result.rows_composed,
    )
