"""Real stages in a lab: found again, failing with their log, and none begun while the run stops."""

import json
import math

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dev.results.lab import FailedError, Lab, artifact, write_json
from dev.results.recipe import TRIAL
from osprey_api.stages import Pinned, PruneConfig

SOURCE = Pinned(uri="pvc://models/source")


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path, TRIAL)
    folder = lab.claims / "models" / "source"
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(8)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return lab


def test_what_was_made_once_is_found_and_what_failed_names_its_log(lab):
    config = PruneConfig(source=SOURCE, layers=2)
    made = lab.run("backbone/tiny", config, {})
    assert not made.reused
    assert not [each for each in lab.scratch("backbone/tiny/prune").iterdir() if each.is_dir()]
    again = Lab(lab.root, TRIAL).run("backbone/tiny", config, {})  # another run, in another process
    assert again.reused
    assert (again.artifact, again.result) == (made.artifact, made.result)
    with lab.files("backbone/tiny", artifact(made)) as folder:
        assert (folder / "model.safetensors").exists()
    assert not folder.exists()
    with pytest.raises(FailedError, match=r"prune failed \(\d+\), see .*/backbone/huge/prune/log"):
        lab.run("backbone/huge", PruneConfig(source=SOURCE, layers=99), {})


def test_a_damaged_artifact_is_made_anew(lab):
    config = PruneConfig(source=SOURCE, layers=1)
    lab.run("backbone/tiny", config, {})
    (weights,) = (lab.root / "storage").rglob("*.safetensors")
    weights.write_bytes(b"")
    assert lab.found(config, {}) is None
    assert not lab.run("backbone/tiny", config, {}).reused


def test_what_a_stage_took_is_that_of_all_its_attempts(lab):
    config = PruneConfig(source=SOURCE, layers=2)
    source = lab.claims / "models" / "source"
    source.rename(source.with_name("away"))
    with pytest.raises(FailedError):
        lab.run("backbone/tiny", config, {})
    source.with_name("away").rename(source)
    made = lab.run("backbone/tiny", config, {})
    (manifest,) = (lab.root / "storage").rglob("manifest.json")
    last = json.loads(manifest.read_text())["seconds"]
    assert made.seconds > last + 0.5  # a process that began and ended
    assert lab.found(config, {}).seconds == pytest.approx(made.seconds, abs=0.5)


def test_what_a_killed_attempt_took_is_not_known(lab):
    config = PruneConfig(source=SOURCE, layers=2)
    fingerprint = lab.task("backbone/tiny", config, {}).fingerprint
    write_json(lab.kept("attempts", fingerprint), {"seconds": 3.0, "open": True})
    assert math.isnan(lab.run("backbone/tiny", config, {}).seconds)
    assert math.isnan(lab.found(config, {}).seconds)


def test_no_process_begins_while_the_run_is_stopped(lab):
    with pytest.raises(KeyboardInterrupt), lab.alone():
        raise KeyboardInterrupt
    with pytest.raises(FailedError, match="being stopped"):
        lab.run("backbone/tiny", PruneConfig(source=SOURCE, layers=2), {})
    with pytest.raises(FailedError, match="being stopped"):
        lab.whole_environment("judged/tiny")


def test_a_file_is_written_whole(tmp_path):
    write_json(tmp_path / "a" / "b.json", {"é": 1})
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.json"]
