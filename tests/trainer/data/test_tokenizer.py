"""The tokenizer as the training stages use it."""

import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from osprey_trainer.data import tokenizer as module
from osprey_trainer.data.tokenizer import DocumentTokenizer


def test_every_id_is_below_the_size_also_where_ids_have_holes(tmp_path):
    words = Tokenizer(models.WordLevel({"owl": 0, "<end>": 1, "flies": 70_000}, unk_token="owl"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(tmp_path)
    tokenizer = DocumentTokenizer.load(tmp_path)
    (ids,) = tokenizer.encode(["flies"])
    assert ids.tolist() == [70_000]
    assert (tokenizer.size, tokenizer.end_id) == (70_001, 1)


SENTENCE = "An owl\u2019s wing, 12 of  them:\n\n\tif owl:\n    fly(h\u00f6her) \u732b\u5934\u9e70. "


@pytest.fixture
def trained(tmp_path):
    """A BPE of one of the usual forms, trained on a sentence."""

    def of(form):
        words = Tokenizer(models.BPE(byte_fallback=form != "bytes"))
        if form == "bytes":  # GPT-2, Llama 3, Qwen, SmolLM2
            words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            words.decoder = decoders.ByteLevel()
        elif form == "marked begin":  # Llama 2, Mistral
            words.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        elif form == "spaces":  # Gemma
            words.normalizer = normalizers.Replace(" ", "\u2581")
            words.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
        alphabet = pre_tokenizers.ByteLevel.alphabet() if form == "bytes" else [*sorted(set(SENTENCE))]
        trainer = trainers.BpeTrainer(special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
        words.train_from_iterator([SENTENCE * 3], trainer)
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(tmp_path)
        return DocumentTokenizer.load(tmp_path)

    return of


@pytest.fixture
def byte_level(trained):
    return trained("bytes")


@pytest.mark.parametrize(("form", "cuts"), [("bytes", True), ("spaces", True), ("marked begin", False)])
def test_a_tokenizer_whose_pieces_would_differ_is_given_texts_as_a_whole(trained, monkeypatch, form, cuts):
    tokenizer = trained(form)
    assert tokenizer.cuts is cuts
    text = SENTENCE * 40
    expected = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 200)
    (found,) = tokenizer.encode([text])
    assert found.tolist() == expected


@pytest.mark.parametrize("characters", [40, 200, 1000])
def test_a_long_text_has_the_tokens_that_it_has_as_a_whole(byte_level, monkeypatch, characters):
    texts = ["owl", SENTENCE * 40, "", "\u732b" * 900 + " owl", SENTENCE, " " * 500]
    monkeypatch.setattr(module, "_SEARCHED", characters)
    expected = [byte_level.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", characters)
    found = byte_level.encode(texts)
    assert [byte_level.tokenizer.decode(ids.tolist()) for ids in found] == texts
    assert [ids.tolist() for ids in found[:3] + found[4:5]] == expected[:3] + expected[4:5]
    assert len(byte_level.encode(SENTENCE * 40)) == len(SENTENCE * 40)  # of any number of texts


MEASURE = """
import resource, sys
from pathlib import Path
from osprey_trainer.data.tokenizer import DocumentTokenizer
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokenizer = DocumentTokenizer.load(Path(sys.argv[1]))
text = sys.argv[2] * (10_000_000 // len(sys.argv[2]))
before = peak()
(ids,) = tokenizer.encode([text])
print(peak() - before, len(ids))
"""


@pytest.mark.usefixtures("byte_level")
def test_a_long_text_takes_little_more_memory_than_its_tokens(tmp_path):
    """In a process of its own: most of it is outside Python's own accounts."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), SENTENCE], stdout=subprocess.PIPE, text=True, check=True
    )
    kibibytes, tokens = map(int, done.stdout.split())
    assert tokens > 1_000_000
    assert kibibytes < 900_000  # measured: 560,000, and 1,870,000 as a whole
