"""Vocabularies of real models, aligned: each row against what the tokenizers themselves say of it."""

import random

import pytest
import torch
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dev import vocabularies
from osprey_trainer.models.backbone import Backbone
from osprey_trainer.vocabulary import TokenTable, align

pytestmark = pytest.mark.long

SAMPLE = 4000
"""Tokens of each pair that are looked at."""
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


@pytest.fixture(scope="module")
def table():
    """Tables by folder, each read once."""
    made = {}
    return lambda folder: made.setdefault(folder, TokenTable.load(folder))


@pytest.fixture(scope="module")
def aligned(table):
    """Pair and alignment by title, each computed once."""
    made = {}

    def find(title):
        pair = vocabularies.pair(title)
        if title not in made:
            rows = {"source_rows": pair.rows[0], "target_rows": pair.rows[1]}
            made[title] = align(table(pair.source), table(pair.target), **rows)
        return pair, made[title]

    return find


def ordinary_tokens(tokenizer):
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return [index for index in range(len(tokenizer)) if index not in special]


def token_bytes(tokenizer, index):
    """Of an ordinary token, as tokenizers write them down; the package's code has no part in it."""
    string = tokenizer.convert_ids_to_tokens(index)
    if tokenizer.backend_tokenizer.decoder.__class__.__name__ == "ByteLevel":
        return bytes(BYTE_OF[character] for character in string)
    if string.startswith("<0x") and string.endswith(">") and len(string) == 6:
        return bytes.fromhex(string[3:5])
    return string.replace("▁", " ").encode()


@pytest.mark.parametrize("title", vocabularies.TITLES)
def test_rows_stand_for_the_same_bytes(aligned, title):
    pair, alignment = aligned(title)
    source, target = (AutoTokenizer.from_pretrained(folder) for folder in (pair.source, pair.target))
    known = {token_bytes(source, index) for index in ordinary_tokens(source)}
    ordinary = ordinary_tokens(target)
    assert sum(not alignment.sources[index] for index in ordinary) == 0  # bytes can always be composed
    for index in random.Random(0).sample(ordinary, SAMPLE):
        rows = alignment.sources[index]
        wanted = token_bytes(target, index)
        assert b"".join(token_bytes(source, row) for row in rows) == wanted, (index, rows)
        text = wanted.decode(errors="replace")
        if "\ufffd" not in text:
            assert source.decode(list(rows), clean_up_tokenization_spaces=False) == text
            assert target.decode([index], clean_up_tokenization_spaces=False) == text
        if len(rows) > 1:  # a token of its own would have been copied
            assert wanted not in known


def test_bytes_of_all_of_qwens_tokens_are_those_of_its_makers(table):
    """Half characters too, of which no decoder tells."""
    found = table(vocabularies.qwen()).content
    written = vocabularies.qwen_bytes()
    assert len(written) == 151643
    assert {index: found[index] for index in written} == written


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        (
            "SmolLM2-135M -> Gemma-3-270M",
            {"<eos>": "<|im_end|>", "<end_of_turn>": "<|im_end|>", "<start_of_turn>": "<|im_start|>", "<mask>": None},
        ),
        (
            "SmolLM2-135M -> Qwen",
            {"<|im_start|>": "<|im_start|>", "<|im_end|>": "<|im_end|>"},
        ),
    ],
)
def test_special_tokens_by_role(aligned, title, expected):
    pair, alignment = aligned(title)
    source, target = (AutoTokenizer.from_pretrained(folder) for folder in (pair.source, pair.target))
    found = {token: alignment.sources[target.convert_tokens_to_ids(token)] for token in expected}
    assert found == {
        token: () if twin is None else (source.convert_tokens_to_ids(twin),) for token, twin in expected.items()
    }


def test_rows_of_the_padding_never_win_on_real_states(aligned):
    pair, alignment = aligned("SmolLM2-135M -> Qwen")
    backbone = Backbone.prune(pair.source, 2)
    ids = AutoTokenizer.from_pretrained(pair.source)("The owl sees a mouse in tall grass. " * 20).input_ids
    with torch.no_grad():
        logits = backbone(torch.tensor([ids])) @ alignment.apply(backbone.head_weight).T
    assert logits.shape[-1] == vocabularies.QWEN_ROWS
    assert int(logits.argmax(-1).max()) < 151646
    assert (logits[..., 151646:] < logits.max(-1, keepdim=True).values).all()
