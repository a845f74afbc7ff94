"""Prompts as the target's own template renders them."""

import datetime as dt

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_serving.chat import PINNED_DATE, Chat


@pytest.fixture
def folder(tmp_path):
    """A byte-level tokenizer that adds <s> by itself, and no template."""
    vocabulary = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    return tmp_path


def rendered(folder, template, prompt):
    (folder / "chat_template.jinja").write_text(template)
    chat = Chat(folder)
    return chat.render(prompt), chat._tokenizer


def test_the_first_token_is_not_doubled(folder):
    message = "{{ messages[0]['role'] }}: {{ messages[0]['content'] }}"
    template = "{{ bos_token }}" + message + "{% if add_generation_prompt %}>{% endif %}"
    ids, tokenizer = rendered(folder, template, "hi ✓")
    assert ids.count(0) == 1
    assert tokenizer.decode(ids) == "<s>user: hi ✓>"


def test_a_template_that_prints_the_date_prints_the_same_one_every_day(folder):
    ids, tokenizer = rendered(folder, "{{ strftime_now('%d %B %Y') }}|{{ messages[0]['content'] }}", "hi")
    assert tokenizer.decode(ids) == f"{PINNED_DATE:%d %B %Y}|hi"
    assert dt.date.today() != PINNED_DATE  # noqa: DTZ011 - else this shows nothing today


def test_without_a_template_there_is_no_guess(folder):
    with pytest.raises(StageError, match=r"no chat template.*chat_template\.jinja") as caught:
        Chat(folder)
    assert caught.value.reason is FailureReason.UNSUPPORTED_MODEL


def test_a_template_that_refuses_is_told(folder):
    with pytest.raises(StageError, match="only systems") as caught:
        rendered(folder, "{{ raise_exception('only systems') }}", "hi")
    assert caught.value.reason is FailureReason.UNSUPPORTED_MODEL


def test_a_folder_without_a_tokenizer_is_told(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(StageError, match=r"tokenizer\.json") as caught:
        Chat(tmp_path)
    assert caught.value.reason is FailureReason.UNSUPPORTED_MODEL
