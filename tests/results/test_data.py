"""No prompt is on both sides, and files stay as they are where nothing changed."""

import json

import pytest

from dev.results import data
from dev.results.recipe import TRIAL, WHOLE
from dev.results.specs import DOMAINS, SMOLLM2, TARGETS
from osprey_api.stages import Pinned, StorageLocation
from osprey_runtime.prompts import held_out_prompts, training_prompts


@pytest.fixture
def claims(tmp_path, monkeypatch):
    monkeypatch.setenv("OSPREY_CLAIMS_ROOT", str(tmp_path))
    monkeypatch.setattr(data, "documents", lambda: ["some text"])
    data.write(tmp_path / "data", WHOLE)
    return tmp_path


def prompts(path):
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]


def told(domain, samples):
    digest = None
    return data.prompt_source(domain, Pinned(uri=f"pvc://data/{domain}.jsonl", digest=digest), samples=samples)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("domain", DOMAINS)
def test_held_out_prompts_are_those_of_the_stages_and_none_is_trained_on(claims, target, domain):
    storage, rule = StorageLocation(uri="file:///"), WHOLE.held_out_of(target)
    source = told(domain, WHOLE.samples_of(target))
    held_out = prompts(claims / "data" / target.name / f"held-out-{domain}.jsonl")
    found = held_out_prompts([source], rule, storage).prompts
    assert [each.conversation.messages[0]["content"] for each in found] == held_out
    trained = [each.conversation.messages[0]["content"] for each in training_prompts([source], rule, storage).prompts]
    assert len(trained) == WHOLE.samples_of(target)
    assert not set(trained) & set(held_out)


def test_other_languages_have_prompts_of_their_own(claims):
    files = [prompts(claims / "data" / f"{name}.jsonl") for name in data.DOMAIN_OF]
    texts = [text for each in files for text in each]
    assert len(set(texts)) == len(texts) == 32


def test_files_that_did_not_change_are_not_written_again(claims):
    path = claims / "data" / "code.jsonl"
    before = path.stat().st_mtime_ns
    data.write(claims / "data", WHOLE)
    assert path.stat().st_mtime_ns == before
    data.write(claims / "data", TRIAL)
    assert len(prompts(claims / "data" / SMOLLM2.name / "held-out-code.jsonl")) == TRIAL.held_out
