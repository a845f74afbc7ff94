"""The judge, on states that were captured before, counts what the simulation counts on the target itself."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dev.demo import simulation
from dev.results.judge import judge
from osprey_api.stages import ArtifactRef, CaptureConfig, CaptureResult, Pinned, StageTask, StorageLocation
from osprey_runtime import manifest
from osprey_runtime.manifest import RemoteArtifact
from osprey_runtime.store import open_store
from osprey_trainer.data.answers import fit, read_dialogues
from osprey_trainer.data.states import ShardWriter, StatesIndex, shard_name
from osprey_trainer.models.draft import Drafter
from osprey_trainer.models.hf_names import read_config, read_embedding
from osprey_trainer.models.target import Target

LAYERS, VOCABULARY, HIDDEN, LENGTH = (3, 4, 5), 64, 16, 48
CHAINS = (2, 5)


@pytest.fixture
def target(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def answers(tmp_path):
    """Folder with answers of few tokens, so that some draft is right."""
    folder = tmp_path / "answers"
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    lines = []
    for number in range(6):
        prompt = torch.randint(3, VOCABULARY, (4 + number,), generator=generator).tolist()
        answer = torch.randint(3, 6, (9 + number,), generator=generator).tolist()
        lines.append({"domain": "code", "prompt_ids": prompt, "answer_ids": answer, "finish": "length"})
    (folder / "answers-00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def captured(target, dialogues, tmp_path):
    """The states, published as capture publishes them."""
    folder = tmp_path / "states"
    folder.mkdir()
    model = Target(target, tapped_layers=LAYERS)
    index = StatesIndex(dtype="float32", hidden_size=HIDDEN, tapped_layers=LAYERS, greedy=True)
    writer = ShardWriter(folder / shard_name(0), dialogues, index)
    for dialogue in dialogues:
        states = model.states(dialogue.ids[None])
        writer.put(dialogue, type(states)(states.taps[0], states.last_hidden[0]), None)
    writer.finish()
    index.write(folder, model.head, shards=1)
    storage = StorageLocation(uri=f"file://{tmp_path / 'storage'}")
    config = CaptureConfig(target=Pinned(uri="pvc://models/tiny"), sequence_length=LENGTH, precision="FP32")
    task = StageTask(fingerprint="f", namespace="n", resource="r", storage=storage, config=config)
    result = CaptureResult(dialogues=len(dialogues), tokens=1, size_bytes=1)
    made = manifest.publish(open_store(storage), "n/capture/f", "test", folder, task=task, result=result)
    return RemoteArtifact(storage, ArtifactRef(uri=task.prefix, digest=made.digest))


def test_captured_states_give_the_counts_of_the_target_itself(target, answers, tmp_path):
    torch.manual_seed(2)
    drafter = Drafter.from_scratch(
        target_config=read_config(target), target_embedding=read_embedding(target), tapped_layers=LAYERS, seed=0
    ).eval()
    drafter.save(tmp_path / "drafter")
    dialogues, _ = fit(read_dialogues(answers, vocab_size=VOCABULARY), sequence_length=LENGTH)
    states = captured(target, dialogues, tmp_path)
    found = judge(drafter, answers, states, CHAINS, sequence_length=LENGTH)
    requests = [
        {"domain": each.domain, "prompt_ids": each.prompt_ids.tolist(), "output_ids": each.answer_ids.tolist()}
        for each in dialogues
    ]
    for chain in CHAINS:
        expected = simulation.verify_steps(target, tmp_path / "drafter", requests, steps=chain)
        assert [each["steps"] for each in found[chain]] == expected
        assert [each["tokens"] for each in found[chain]] == [len(each.answer_ids) for each in dialogues]
        assert {each["domain"] for each in found[chain]} == {"code"}
