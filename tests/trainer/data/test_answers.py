import json

import pytest

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.data.answers import count_answer_tokens, fit, read_dialogues


def line(prompt, answer, domain="maths"):
    return json.dumps({"domain": domain, "prompt_ids": prompt, "answer_ids": answer, "finish": "stop"})


def write(folder, *files):
    for number, lines in enumerate(files):
        (folder / f"answers-{number:05d}.jsonl").write_text("".join(f"{text}\n" for text in lines))
    return folder


def read(folder):
    return list(read_dialogues(folder, vocab_size=100))


def test_files_are_read_in_order_with_names(tmp_path):
    folder = write(tmp_path, [line([1, 2], [3])], [line([4], [5, 6], domain="code")])
    first, second = read(folder)
    assert (first.name, second.name) == ("answers-00000.jsonl, line 1", "answers-00001.jsonl, line 1")
    assert second.domain == "code"
    assert first.ids.tolist() == [1, 2, 3]
    assert first.answer_mask.tolist() == [False, False, True]


@pytest.mark.parametrize(
    "bad",
    ["{", "[]", '{"domain": "x", "prompt_ids": [1]}', line([1], [100]), line([-1], [1]), line([], [1, 2, 3])],
)
def test_a_broken_line_is_named(tmp_path, bad):
    folder = write(tmp_path, [line([1], [2]), bad])
    with pytest.raises(StageError, match=r"answers-00000\.jsonl, line 2") as caught:
        read(folder)
    assert caught.value.reason is FailureReason.CORRUPT_ARTIFACT


def test_the_policy_for_dialogues_that_do_not_fit(tmp_path):
    folder = write(
        tmp_path,
        [
            line([1] * 4, [2] * 6),  # fits exactly
            line([1] * 4, [2] * 7),  # its answer is cut
            line([1] * 8, [2] * 9),  # cut to the two tokens of which one is supervised
            line([1] * 9, [2] * 9),  # the prompt leaves no room
            line([1] * 4, [2]),  # the target's prefill makes the only token
            line([1] * 4, []),
        ],
    )
    kept, counts = fit(iter(read(folder)), sequence_length=10)
    assert [(len(d.prompt_ids), len(d.answer_ids)) for d in kept] == [(4, 6), (4, 6), (8, 2)]
    assert (counts.kept, counts.truncated, counts.too_long, counts.too_short) == (3, 2, 1, 2)
    assert (counts.answer_tokens, counts.draftable_tokens) == (14, 11)


def test_no_supervised_token_at_all_is_refused(tmp_path):
    folder = write(tmp_path, [line([1] * 9, [2] * 9), line([1], [2])])
    with pytest.raises(StageError, match="too long 1, too short 1") as caught:
        fit(iter(read(folder)), sequence_length=10)
    assert caught.value.reason is FailureReason.INVALID_DATA


def test_answer_tokens_are_counted_without_prompts(tmp_path):
    folder = write(tmp_path, [line([1, 2], [3, 3, 4]), line([5], [4])])
    counts = count_answer_tokens(iter(read(folder)), vocab_size=100)
    assert counts.nonzero().flatten().tolist() == [3, 4]
    assert counts[[3, 4]].tolist() == [2, 2]
