"""A finished drafter that is imported: taken over as it is, or refused with what is wrong."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from osprey_api.conditions import ExitCode, FailureReason
from osprey_api.stages import AdoptConfig, ArtifactRef, Pinned
from osprey_serving.plugin import checkpoint
from osprey_trainer.vocabulary import TokenTable

ON_TARGET = {"vocab_size": 328, "target_hidden_size": 24, "draft_vocab_size": 50}
PUBLISHED = ON_TARGET | {
    "architectures": ["Qwen3ForCausalLMEagle3"],
    "model_type": "qwen3",
    "swap_h_and_emb": True,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 500.0,
    "torch_dtype": "float16",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
}


@pytest.fixture
def publish(machine, tmp_path):
    """Writes a drafter as somebody else would, and returns where it is."""

    def write(name="drafter", *, without=(), more=None, **changes):
        config = {key: value for key, value in (PUBLISHED | changes).items() if value is not None}
        generator = torch.Generator().manual_seed(0)
        tensors = {
            key: torch.randn(shape, generator=generator).half()
            for key, shape in checkpoint.expected_tensors(config).items()
            if key not in without
        }
        if config["vocab_size"] >= 100:
            ids = torch.arange(0, 100, 2)
            tensors["d2t"] = ids - torch.arange(50)
            tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, ids, value=True)
        folder = tmp_path / "released" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors | (more or {}), folder / "model.safetensors")
        return machine.released(folder)

    return write


def adopt(machine, drafter, target="target"):
    return machine.task(AdoptConfig(target=Pinned(uri=f"pvc://models/{target}")), drafter=drafter)


def test_a_published_drafter_is_taken_over_for_its_target(machine, publish, claims):
    drafter = publish()
    outcome = machine.done(adopt(machine, drafter))
    assert (outcome.result.layers, outcome.result.draft_vocab_size) == (2, 50)
    folder = machine.files(outcome.artifact)
    config = checkpoint.check(folder)  # as SGLang will look at it
    given = load_file(f"{drafter.uri.removeprefix('file://')}/model.safetensors")
    taken = load_file(folder / "model.safetensors")
    assert taken.keys() == given.keys()
    assert all(torch.equal(taken[name], given[name].to(taken[name].dtype)) for name in given)
    assert outcome.result.parameters == sum(
        value.numel() for name, value in given.items() if name not in {"d2t", "t2d"}
    )
    # What it says of its target is the target's.
    target = json.loads((claims / "models" / "target" / "config.json").read_text())
    said = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype")
    assert {name: config[name] for name in said} == {name: target[name] for name in said}
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    # What is taken over is a finished drafter like any other, and can be imported by its own digest.
    again = machine.done(adopt(machine, outcome.artifact))
    assert load_file(machine.files(again.artifact) / "model.safetensors").keys() == given.keys()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"without": ("layers.1.hidden_norm.weight",)}, "missing layers.1.hidden_norm.weight"),
        ({"without": ("d2t", "t2d"), "vocab_size": 99, "draft_vocab_size": 99}, "missing d2t; missing t2d"),
        ({"more": {"layers.0.self_attn.q_proj.bias": torch.zeros(16)}}, "unknown layers.0.self_attn.q_proj.bias"),
        ({"more": {"layers.2.hidden_norm.weight": torch.zeros(16)}}, "unknown layers.2.hidden_norm.weight"),
        ({"more": {"fc.weight": torch.zeros(16, 48)}}, "fc.weight has shape (16, 48), not (16, 72)"),
        ({"vocab_size": 320}, "made for a target of 320 tokens, and this one has 328"),
        ({"target_hidden_size": 32}, "a target of 32 numbers in a hidden state, and this one has 24"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}}, "[2, 15, 27] are not three ascending"),
        ({"norm_before_fc": True}, "says norm_before_fc: True"),
    ],
)
def test_what_is_no_drafter_of_the_target_is_refused(machine, publish, options, words):
    drafter = publish(**options)
    code, outcome = machine.run(adopt(machine, drafter))
    assert code == ExitCode.WRONG_INPUT  # it is the same next time
    wanted = FailureReason.UNSUPPORTED_MODEL if "norm_before_fc" in options else FailureReason.INVALID_CONFIG
    assert outcome.failure is wanted
    assert outcome.message.startswith(drafter.uri)
    assert words in outcome.message
    assert outcome.message.endswith("Correct spec.import.")


def test_a_drafter_for_other_tokens_of_the_same_number_is_refused(machine, claims, greedy_answers, retokenized):
    """The tensors fit, and so do all sizes; what it drafts would hardly ever be accepted."""
    names = ("target", "retokenized")
    tables = [TokenTable.load(claims / "models" / name) for name in names]
    assert tables[0].size == tables[1].size
    made = machine.done(machine.convert(machine.answers(greedy_answers))).artifact
    here = machine.done(adopt(machine, made))
    assert here.result.vocabulary_compared
    assert checkpoint.read_config(machine.files(here.artifact))["target_vocabulary_digest"] == tables[0].digest
    code, outcome = machine.run(adopt(machine, made, target="retokenized"))
    assert (code, outcome.failure) == (ExitCode.WRONG_INPUT, FailureReason.INVALID_CONFIG)
    assert outcome.message.startswith(made.uri)
    assert f"says target_vocabulary_digest {tables[0].digest}, and this target's" in outcome.message
    assert f"tokenizer has {tables[1].digest}. Import one made for it" in outcome.message
    # Trained for it, it has other rows, and says so.
    trained = machine.done(machine.convert(machine.answers(greedy_answers), target=retokenized)).artifact
    assert machine.done(adopt(machine, trained, target="retokenized")).result.vocabulary_compared


@pytest.mark.usefixtures("retokenized")
def test_of_a_drafter_that_names_no_vocabulary_this_is_said(machine, publish, claims, caplog):
    """As all that others publish: what it is worth, the gate finds."""
    drafter = publish()
    for target in ("target", "retokenized"):
        caplog.clear()
        outcome = machine.done(adopt(machine, drafter, target=target))
        assert not outcome.result.vocabulary_compared
        assert "has no target_vocabulary_digest, so only the number of the target's tokens was compared" in caplog.text
        assert "target_vocabulary_digest" not in checkpoint.read_config(machine.files(outcome.artifact))
    released = publish("digested", target_vocabulary_digest=TokenTable.load(claims / "models" / "target").digest)
    assert machine.done(adopt(machine, released)).result.vocabulary_compared


def test_another_digest_is_told_with_the_right_one(machine, publish):
    drafter = publish()
    wrong = ArtifactRef(uri=drafter.uri, digest=f"sha256:{'0' * 64}")
    code, outcome = machine.run(adopt(machine, wrong))
    assert (code, outcome.failure) == (ExitCode.TRY_AGAIN, FailureReason.CORRUPT_ARTIFACT)
    assert drafter.digest in outcome.message
    assert "correct the digest in spec.import" in outcome.message


def test_a_folder_that_is_not_there_or_no_drafter(machine, claims, tmp_path):
    shutil.copytree(claims / "models" / "source", tmp_path / "backbone")
    code, outcome = machine.run(adopt(machine, machine.released(tmp_path / "backbone")))
    assert (code, outcome.failure) == (ExitCode.WRONG_INPUT, FailureReason.UNSUPPORTED_MODEL)
    assert "is a LlamaForCausalLM; drafters that can be read are" in outcome.message
    nowhere = ArtifactRef(uri=f"file://{tmp_path}/nowhere", digest=f"sha256:{'0' * 64}")
    code, outcome = machine.run(adopt(machine, nowhere))
    assert (code, outcome.failure) == (ExitCode.WRONG_INPUT, FailureReason.SOURCE_NOT_FOUND)
