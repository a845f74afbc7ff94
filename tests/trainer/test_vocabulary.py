"""Alignment by bytes, and the draft vocabulary."""

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from osprey_runtime.errors import StageError
from osprey_trainer.vocabulary import Alignment, TokenTable, align, choose_draft_vocabulary

# Byte-level alphabet, in the order GPT-2 gives it; sorted so that ids are easy to find.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(merges, specials, **roles):
    """Ids: 256 bytes, one token per merge, then the special tokens."""
    tokens = [*ALPHABET, *(a + b for a, b in merges)]
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return TokenTable.from_hf(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles))


def sentence_piece(pieces, specials, **roles):
    """Ids: the special tokens, 256 byte pieces, then the pieces."""
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[], byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return TokenTable.from_hf(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles))


QWEN = byte_level(
    [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ã", "©")],
    ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim|>"],
    eos_token="<|im_end|>",
    pad_token="<|endoftext|>",
)
LLAMA = sentence_piece(
    ["▁the", "the", "in", "é", "▁", "t", "A", "thein", "日"],
    ["<unk>", "<s>", "</s>"],
    bos_token="<s>",
    eos_token="</s>",
    unk_token="<unk>",
)


def row(table, string):
    return next(index for index, token in table.strings.items() if token == string)


def sources(alignment, target, string):
    return alignment.sources[row(target, string)]


def test_bytes_of_tokens():
    assert QWEN.content[row(QWEN, "Ġthe")] == LLAMA.content[row(LLAMA, "▁the")] == b" the"
    assert QWEN.content[row(QWEN, "Ã©")] == LLAMA.content[row(LLAMA, "é")] == "é".encode()
    assert LLAMA.content[row(LLAMA, "<0x0A>")] == QWEN.content[row(QWEN, "Ċ")] == b"\n"
    assert QWEN.content[row(QWEN, "Ã")] == b"\xc3"  # half a character
    assert row(QWEN, "<|im_end|>") not in QWEN.content


def test_byte_level_rows_for_a_sentence_piece_target():
    alignment = align(QWEN, LLAMA, source_rows=270, target_rows=280)
    assert sources(alignment, LLAMA, "▁the") == (row(QWEN, "Ġthe"),)
    assert sources(alignment, LLAMA, "é") == (row(QWEN, "Ã©"),)
    assert sources(alignment, LLAMA, "A") == sources(alignment, LLAMA, "<0x41>") == (row(QWEN, "A"),)
    assert sources(alignment, LLAMA, "thein") == (row(QWEN, "the"), row(QWEN, "in"))
    assert sources(alignment, LLAMA, "日") == tuple(row(QWEN, x) for x in "æĹ¥")
    assert alignment.sources[len(LLAMA.strings) :] == ((),) * (280 - len(LLAMA.strings))
    assert alignment.composed == 2
    assert alignment.copied + alignment.composed + alignment.left == len(LLAMA.strings)


def test_sentence_piece_rows_for_a_byte_level_target():
    alignment = align(LLAMA, QWEN, source_rows=300, target_rows=265)
    assert sources(alignment, QWEN, "Ġthe") == (row(LLAMA, "▁the"),)
    assert sources(alignment, QWEN, "A") == (row(LLAMA, "A"),)  # the ordinary piece, not its byte twin
    assert sources(alignment, QWEN, "B") == (row(LLAMA, "<0x42>"),)
    assert sources(alignment, QWEN, "Ã") == (row(LLAMA, "<0xC3>"),)
    assert sources(alignment, QWEN, "th") == (row(LLAMA, "t"), row(LLAMA, "<0x68>"))


def test_special_tokens_go_by_role_not_by_string():
    smollm = byte_level(
        [],
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim|>"],
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    alignment = align(QWEN, smollm, source_rows=270, target_rows=260)
    assert sources(alignment, smollm, "<|im_start|>") == (row(QWEN, "<|im_start|>"),)
    assert sources(alignment, smollm, "<|im_end|>") == (row(QWEN, "<|im_end|>"),)
    assert sources(alignment, smollm, "<|endoftext|>") == ()  # pad there, unknown here
    assert sources(alignment, smollm, "<|fim|>") == (row(QWEN, "<|fim|>"),)

    to_llama = align(QWEN, LLAMA, source_rows=270, target_rows=280)
    assert sources(to_llama, LLAMA, "</s>") == (row(QWEN, "<|im_end|>"),)
    assert sources(to_llama, LLAMA, "<s>") == ()
    to_qwen = align(LLAMA, QWEN, source_rows=300, target_rows=265)
    assert sources(to_qwen, QWEN, "<|im_end|>") == (row(LLAMA, "</s>"),)


def test_equal_tokenizers_are_the_identity():
    alignment = align(QWEN, QWEN, source_rows=270, target_rows=267)
    size = len(QWEN.strings)
    assert alignment.sources[:size] == tuple((index,) for index in range(size))
    assert (alignment.copied, alignment.composed, alignment.left) == (size, 0, 0)


def test_a_tokenizer_larger_than_its_model_is_refused():
    with pytest.raises(StageError, match="tokenizer of the target has ids up to 264, but its model has 200"):
        align(QWEN, QWEN, source_rows=265, target_rows=200)


def test_rows_are_copied_averaged_or_the_mean():
    table = torch.tensor([[1.0, 0.0], [3.0, 2.0], [9.0, 9.0]])
    alignment = Alignment(sources=((1,), (0, 1), (), ()), copied=1, composed=1, left=1)
    expected = torch.tensor([[3.0, 2.0], [2.0, 1.0], [2.5, 1.5], [2.5, 1.5]])
    assert torch.equal(alignment.apply(table), expected)


def test_rows_of_the_padding_never_win():
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(270, 8, generator=generator)
    head = align(QWEN, LLAMA, source_rows=270, target_rows=300).apply(table)
    winners = (torch.randn(2000, 8, generator=generator) @ head.T).argmax(-1)
    assert winners.max() < len(LLAMA.strings)


def test_draft_vocabulary_by_frequency_then_id():
    counts = torch.tensor([5, 0, 7, 5, 5, 9, 0, 0])
    chosen = choose_draft_vocabulary(counts, 4, num_tokens=7)
    assert chosen.ids.tolist() == [0, 2, 3, 5]  # 4 is as frequent as 0 and 3, and comes later
    assert chosen.d2t.tolist() == [0, 1, 1, 2]
    assert chosen.t2d.tolist() == [True, False, True, True, False, True, False, False]
    assert chosen.coverage == pytest.approx(26 / 31)


def test_too_few_seen_tokens_are_joined_by_the_lowest_ids():
    counts = torch.tensor([0, 0, 0, 2, 0, 1, 0, 0])
    chosen = choose_draft_vocabulary(counts, 4, num_tokens=7)
    assert chosen.ids.tolist() == [0, 1, 3, 5]
    assert chosen.coverage == 1.0


@pytest.mark.parametrize("size", [7, 8, 32000])
def test_asking_for_all_tokens_is_the_identity(size):
    chosen = choose_draft_vocabulary(torch.ones(8, dtype=torch.long), size, num_tokens=7)
    assert torch.equal(chosen.d2t, torch.zeros(8, dtype=torch.long))
    assert chosen.t2d.all()
    assert torch.equal(chosen.ids, torch.arange(8))


def test_no_answers_no_vocabulary():
    with pytest.raises(StageError, match="hold no token"):
        choose_draft_vocabulary(torch.zeros(8, dtype=torch.long), 4, num_tokens=7)


# ---------------------------------------------------------------------------------------------------- digest


def test_the_digest_is_of_the_bytes_of_the_own_tokens_by_id():
    merges = [("t", "h"), ("i", "n")]
    one = byte_level(merges, ["<s>", "<a>"])
    assert byte_level(merges, ["<s>", "<a>"]).digest == one.digest
    # Special tokens, and others that were added, are renamed from model to model, and hardly ever drafted.
    renamed = byte_level(merges, ["<s>", "<tool>"])
    tokenizer = Tokenizer.from_str(one.tokenizer.to_str())
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    more = TokenTable.from_hf(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert more.size == one.size + 1
    assert renamed.digest == more.digest == one.digest
    # As many tokens, of which one is another; the same tokens with other ids; what is at which id.
    others = [
        byte_level([("t", "h"), ("i", "s")], ["<s>", "<a>"]),
        byte_level([("i", "n"), ("t", "h")], ["<s>", "<a>"]),
        byte_level([("t", "h")], ["<s>", "<a>", "<b>"]),
    ]
    assert {other.size for other in others} == {one.size}
    assert len({one.digest, *(other.digest for other in others)}) == 4
