"""Every row of an aligned vocabulary, against a reference that does for one token at a time what the docs say."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from osprey_trainer.vocabulary import TokenTable, align

TEXTS = [
    "the owl sees a mouse in tall grass, and waits until night comes over the hills",
    "der Uhu hört eine Maus über dem Schnee; größer ist nur die Öde",
    "猫头鹰 在 夜里 看见 老鼠。猫头鹰 等待，直到 夜晚 来临。夜里 很冷",
    "сова видит мышь в траве и ждёт до ночи, а мышь не видит совы",
    "def owl(x):\n    return {k: v + 1 for k, v in x.items()}\n\n\n        # 🦉🦉 🐭\t🌙",
] * 4
MISSING = b"\xc0\xc1\xf5\xf6\xf7\xf8\xf9\xfa\xfb\xfc\xfd\xfe\xff"
"""Bytes that no valid text has; some tokenizers that were trained on text lack them."""


@dataclass
class Vocabulary:
    """A tokenizer with what is known of its ids from the way it was made.

    Attributes:
        content: bytes of the ordinary tokens, by id.
        byte_pieces: of these, the `<0xNN>`.
        special: strings, by id.
        roles: of the special ones: id by what it does.
    """

    hf: PreTrainedTokenizerFast
    content: dict[int, bytes]
    byte_pieces: set[int]
    special: dict[int, str]
    roles: dict[str, int]

    @property
    def size(self) -> int:
        return len(self.content) + len(self.special)


def byte_level(size: int, texts: list[str], *, lacking: bytes = b"") -> Vocabulary:
    """As Qwen's: bytes and their merges first, special tokens at the end."""
    letter = bytes_to_unicode()
    byte_of = {character: byte for byte, character in letter.items()}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = [letter[byte] for byte in range(256) if byte not in lacking]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    ordinary = tokenizer.get_vocab()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim|>", "<|vision|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    first = len(ordinary)
    return Vocabulary(
        hf,
        {index: bytes(byte_of[character] for character in token) for token, index in ordinary.items()},
        set(),
        dict(enumerate(special, start=first)),
        {"pad": first, "turn_start": first + 1, "turn_end": first + 2, "eos": first + 2},
    )


def sentence_piece(size: int, texts: list[str], *, prefix: bool) -> Vocabulary:
    """As Llama 2's: special tokens, 256 byte pieces, then merges of characters; `prefix`: texts begin with a space."""
    steps = [normalizers.Replace(" ", "▁")]
    if prefix:
        steps.insert(0, normalizers.Prepend("▁"))
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence(steps)
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    learned = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    special = ["<unk>", "<s>", "</s>", "<|fim|>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *(piece for piece, _ in learned)]
    merges = [tuple(merge) for merge in _merges(trained)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    n = len(special)
    content = {n + byte: bytes([byte]) for byte in range(256)}
    content |= {n + 256 + i: piece.replace("▁", " ").encode() for i, (piece, _) in enumerate(learned)}
    return Vocabulary(
        hf,
        content,
        {n + byte for byte in range(256)},
        dict(enumerate(special)),
        {"unk": 0, "bos": 1, "eos": 2, "pad": 2},
    )


def _merges(trained: Tokenizer) -> list[list[str]]:
    return [
        merge if isinstance(merge, list) else merge.split(" ")
        for merge in json.loads(trained.to_str())["model"]["merges"]
    ]


MAKERS: dict[str, Callable[[], Vocabulary]] = {
    "byte-level": lambda: byte_level(700, TEXTS),
    "byte-level, few merges, some bytes missing": lambda: byte_level(300, TEXTS[:2], lacking=MISSING),
    "SentencePiece": lambda: sentence_piece(400, TEXTS, prefix=False),
    "SentencePiece with a prefix": lambda: sentence_piece(150, TEXTS[1:3], prefix=True),
}


@pytest.fixture(scope="module")
def vocabularies() -> dict[str, Vocabulary]:
    return {name: make() for name, make in MAKERS.items()}


def reference(source: Vocabulary, target: Vocabulary, index: int) -> tuple[int, ...]:
    """Rows of the source for one id of the target."""
    if index in target.special:
        return special(source, target, index)
    if index not in target.content:
        return ()  # padding
    content = target.content[index]
    twins = [row for row in sorted(source.content) if source.content[row] == content]
    ordinary = [row for row in twins if row not in source.byte_pieces]
    pieces = [row for row in twins if row in source.byte_pieces]
    if index in target.byte_pieces and pieces:
        return (pieces[0],)
    if twins:
        return ((ordinary or pieces)[0],)
    return as_the_source_splits_it(source, content) or by_longest_match(source, content)


def special(source: Vocabulary, target: Vocabulary, index: int) -> tuple[int, ...]:
    for role in [role for role, owner in target.roles.items() if owner == index]:
        if role in source.roles:
            return (source.roles[role],)
        if role == "turn_end" and "eos" in source.roles:
            return (source.roles["eos"],)
    if index in target.roles.values():
        return ()
    same = [row for row, text in source.special.items() if text == target.special[index]]
    return tuple(row for row in same if row not in source.roles.values())


def as_the_source_splits_it(source: Vocabulary, content: bytes) -> tuple[int, ...]:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return ()
    ids = source.hf.encode(text, add_special_tokens=False)
    return tuple(ids) if b"".join(source.content.get(row, b"?") for row in ids) == content else ()


def by_longest_match(source: Vocabulary, content: bytes) -> tuple[int, ...]:
    ids: list[int] = []
    while content:
        fitting = [row for row, piece in source.content.items() if piece and content.startswith(piece)]
        if not fitting:
            return ()
        longest = max(len(source.content[row]) for row in fitting)
        best = min((row in source.byte_pieces, row) for row in fitting if len(source.content[row]) == longest)[1]
        ids.append(best)
        content = content[longest:]
    return tuple(ids)


PAIRS = [(one, other) for one in MAKERS for other in MAKERS if one != other]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: name)
def test_every_row_is_where_the_reference_finds_it(vocabularies, source, target):
    one, other = vocabularies[source], vocabularies[target]
    rows = (one.size + 3, other.size + 5)
    found = align(TokenTable.from_hf(one.hf), TokenTable.from_hf(other.hf), source_rows=rows[0], target_rows=rows[1])
    expected = [reference(one, other, index) for index in range(rows[1])]
    different = [index for index in range(rows[1]) if found.sources[index] != expected[index]]
    assert not different, [(index, other.hf.convert_ids_to_tokens(index)) for index in different[:5]]
    tokens = expected[: other.size]
    assert found.copied == sum(len(sources) == 1 for sources in tokens)
    assert found.composed == sum(len(sources) > 1 for sources in tokens)
    assert found.left == sum(not sources for sources in tokens)

    generator = torch.Generator().manual_seed(0)
    table = torch.randn(rows[0], 6, generator=generator, dtype=torch.float64)
    means = [sum(table[row] for row in sources) / len(sources) if sources else None for sources in expected]
    known = [mean for mean in means if mean is not None]
    left = sum(known) / len(known)
    aligned = found.apply(table)
    wanted = torch.stack([left if mean is None else mean for mean in means])
    torch.testing.assert_close(aligned.double(), wanted, atol=1e-5, rtol=1e-5)
    # What asks for the padding as loudly as can be gets another token.
    asking = torch.cat([torch.randn(500, 6, generator=generator), left.float() + torch.zeros(1, 6)])
    winners = (asking @ aligned.float().T).argmax(-1)
    assert set(winners.tolist()) <= {index for index in range(rows[1]) if expected[index]}


def test_the_pairs_show_every_way_a_row_can_come_to_be(vocabularies):
    def halves(name: str) -> list[int]:
        return [
            index
            for index, content in vocabularies[name].content.items()
            if len(content) > 1 and content.decode(errors="ignore").encode() != content
        ]

    assert len(halves("byte-level")) > 20  # merges inside of characters
    byte, few, piece, prefixed = vocabularies.values()

    def ways(source: Vocabulary, target: Vocabulary, ids: list[int]) -> set[int]:
        return {min(len(reference(source, target, index)), 2) for index in ids}

    partial = halves("byte-level")
    assert ways(piece, byte, partial) == {2}  # of byte pieces
    assert 2 in ways(few, byte, partial)
    for source, target in ((byte, piece), (piece, byte), (few, prefixed), (prefixed, few)):
        assert ways(source, target, list(target.content)) >= {1, 2}
        assert ways(source, target, list(target.special)) == {0, 1}
    assert 0 in ways(few, piece, list(piece.byte_pieces))  # bytes that it has no token for
