"""What becomes of the rows of data, from the file to the figures of a stage."""

import json

import pytest

from osprey_api.rows import DropReason
from osprey_api.stages import DataToResolve, Pinned
from osprey_trainer.data import shards, tokenizer
from osprey_trainer.data.tokenizer import DocumentTokenizer

ODD = {21: "{", 22: '{"text": ""}', 23: '{"text": "half \\ud800"}'}


@pytest.fixture
def text(claims):
    """60 rows, of which three are of no use; one of them is blank."""
    lines = [ODD.get(number, json.dumps({"text": f"the owl sees {number}"})) for number in range(1, 61)]
    (claims / "data" / "odd.jsonl").write_text("\n".join(lines))
    return "pvc://data/odd.jsonl"


EXPECTED = {DropReason.NOT_JSON: 1, DropReason.BLANK_TEXT: 1, DropReason.BAD_CHARACTER: 1}


def test_rows_add_up_in_status_and_artifact(machine, text):
    source = DataToResolve(name="text", uri=text, kind="Text", field="text")
    (resolved,) = machine.done(machine.resolve(data=(source,))).result.data
    assert (resolved.rows, resolved.dropped) == (57, EXPECTED)
    outcome = machine.done(machine.tokenize(text=resolved.source))
    assert (outcome.result.rows, outcome.result.rows_read, outcome.result.dropped) == (57, 60, EXPECTED)
    (account,) = json.loads((machine.files(outcome.artifact) / "rows.json").read_text())["sources"]
    assert account["read"] == account["kept"] + sum(account["dropped"].values()) == 60
    assert account["examples"]["NotJson"][0].startswith(f"{text} line 21: ")


def test_a_single_odd_row_of_few_is_too_many_unless_it_is_allowed(machine, claims):
    (claims / "data" / "few.jsonl").write_text('{"text": "a"}\n{\n')
    source = DataToResolve(name="text", uri="pvc://data/few.jsonl", kind="Text", field="text")
    code, outcome = machine.run(machine.resolve(data=(source,)))
    assert code == 64
    assert "pvc://data/few.jsonl line 2: " in outcome.message
    allowed = source.model_copy(update={"max_dropped": 0.5})
    assert machine.done(machine.resolve(data=(allowed,))).result.data[0].rows == 1


def test_tokenizing_goes_on_behind_the_last_full_shard_to_the_same_bytes(machine_of, tmp_path, text, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_TOKENS", 100)
    monkeypatch.setattr(tokenizer, "GROUP_CHARACTERS", 60)
    encode, encoded, killed_at = DocumentTokenizer.encode, [], set()

    def counted(self, texts):
        encoded.append(len(texts))
        if len(encoded) in killed_at:
            raise RuntimeError("killed")
        return encode(self, texts)

    monkeypatch.setattr(DocumentTokenizer, "encode", counted)
    source = Pinned(uri=text)
    (tmp_path / "whole").mkdir()
    whole = machine_of(tmp_path / "whole")
    expected = files_of(whole, whole.done(whole.tokenize(text=source)))
    batches = len(encoded)
    assert len([name for name in expected if name.endswith(".bin")]) > 4
    (tmp_path / "broken").mkdir()
    broken = machine_of(tmp_path / "broken")
    for batch in (5, 9, 3):
        encoded.clear()
        killed_at = {batch}
        _, outcome = broken.run(broken.tokenize(text=source))
        assert "killed" in outcome.message
    encoded.clear()
    killed_at = set()
    outcome = broken.done(broken.tokenize(text=source))
    assert files_of(broken, outcome) == expected
    assert len(encoded) < batches / 2  # only what no shard held yet
    assert (outcome.result.rows, outcome.result.rows_read) == (57, 60)


def files_of(machine, outcome) -> dict[str, bytes]:
    folder = machine.files(outcome.artifact)
    return {path.name: path.read_bytes() for path in folder.iterdir()}
