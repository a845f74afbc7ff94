"""Answers with reasoning, from a real server to the rows that a drafter learns from."""

import json
from types import SimpleNamespace

import httpx
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from osprey_api.stages import Pinned, PromptSource
from osprey_trainer.data.answers import fit, read_dialogues
from osprey_trainer.data.teacher import OnlineTeacher
from osprey_trainer.masks import supervise
from osprey_trainer.models.target import Target

pytestmark = pytest.mark.timeout(600)

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif opened %}<think>{% endif %}{% endif %}"
)
"""As Qwen3's: what was thought in earlier turns is left out, and thinking can be turned off. Or, as DeepSeek-R1's: the
prompt itself opens it, and the answer only closes it."""
ANSWER = ["<think>", "a", "b", "c", "</think>", "X", "Y", "Z", "Ġ", "<|im_end|>"]
"""It ends in a space (Ġ), which is learned as well."""
NEXT = dict(zip([":", *ANSWER], ANSWER, strict=False)) | {"Ċ": "X"}  # Ċ is a new line: the end of a closed block
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
OPENED = {"chat_template_kwargs": {"enable_thinking": True, "opened": True}}
ROWS = [
    {"prompt": "why", **THINKING},
    {"messages": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>old</think>Ho"},
        {"role": "user", "content": "two"},
    ], **THINKING},
    {"prompt": "no"},
    {"prompt": "open", **OPENED},
]  # fmt: skip
PROMPTS = [
    "<|im_start|>user:why<|im_end|>\n<|im_start|>assistant:",
    "<|im_start|>user:one<|im_end|>\n<|im_start|>assistant:Ho<|im_end|>\n<|im_start|>user:two<|im_end|>\n<|im_start|>assistant:",
    "<|im_start|>user:no<|im_end|>\n<|im_start|>assistant:<think>\n\n</think>\n\n",
    "<|im_start|>user:open<|im_end|>\n<|im_start|>assistant:<think>",
]
ANSWERS = ["".join(said).replace("Ġ", " ") for said in (ANSWER, ANSWER, ANSWER[5:], ANSWER[1:])]


def make_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    raw.add_tokens([AddedToken(token, special=False) for token in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def thinker(world):
    """A target that thinks: each token is followed by its one successor."""
    tokenizer = make_tokenizer()
    ids = tokenizer.get_vocab()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=ids["<|im_end|>"],
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        embedding = torch.nn.functional.normalize(torch.randn(264, 64))
        model.model.embed_tokens.weight.copy_(embedding)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for token, following in NEXT.items():
            model.lm_head.weight[ids[following]] += embedding[ids[token]]
    folder = world.claims / "models" / "thinker"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (world.claims / "data" / "puzzles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return SimpleNamespace(folder=folder, tokenizer=tokenizer)


def test_reasoning_is_kept_and_learned_token_by_token(pod, configs, thinker, sglang_server, admin_key):
    decode = thinker.tokenizer.decode
    source = PromptSource(
        name="puzzles",
        source=Pinned(uri="pvc://data/puzzles.jsonl"),
        prompt_field=None,
        samples=None,
        train=True,
        evaluate=False,
    )
    config = configs.regenerate(target=Pinned(uri="pvc://models/thinker"), prompts=(source,))
    unless_asked = ("--default-chat-template-kwargs", '{"enable_thinking": false}')
    with sglang_server(thinker.folder, extra_args=unless_asked, admin_key=admin_key) as server:
        outcome = pod.run(config, server.url)
        assert outcome.failure is None, outcome.message
        served = [chat(server, row) for row in ROWS]

    # A drafter's data: the same ids that the server saw and said, in whatever order the prompts came.
    kept, _ = fit(read_dialogues(pod.files(outcome), vocab_size=264), sequence_length=512)
    found = {decode(dialogue.prompt_ids): dialogue for dialogue in kept}
    assert set(found) == set(PROMPTS)
    dialogues = [found[prompt] for prompt in PROMPTS]
    assert [decode(dialogue.answer_ids) for dialogue in dialogues] == ANSWERS
    for dialogue, (prompt_tokens, said) in zip(dialogues, served, strict=True):
        assert len(dialogue.prompt_ids) == prompt_tokens
        assert decode(dialogue.answer_ids, skip_special_tokens=True) == said

    # What is learned: all of the answer behind its first token, reasoning and end token too, and nothing of the prompt.
    steps = 3
    batch = OnlineTeacher(Target(thinker.folder), greedy=True, device=torch.device("cpu")).batch(dialogues)
    wanted = supervise(batch, torch.ones(264, dtype=torch.bool), steps)
    start = 0
    for ids, dialogue in zip(batch.by_dialogue(batch.ids), dialogues, strict=True):
        assert ids.tolist() == [*dialogue.prompt_ids.tolist(), *dialogue.answer_ids.tolist()]
        here = (wanted.rows >= start) & (wanted.rows < start + len(ids))
        for k in range(steps):
            at = wanted.scored[k] & here
            assert wanted.labels[k][at].tolist() == dialogue.answer_ids[1 + k :].tolist()
            first = len(dialogue.prompt_ids) - 1
            assert (wanted.rows[at] - start).tolist() == list(range(first, len(ids) - 2 - k))
        start += len(ids)


def chat(server, row):
    """Tokens of the prompt, and the answer, as the server's own chat endpoint has them."""
    request = {"model": "x", "temperature": 0, "max_tokens": 32, **row}
    if "prompt" in request:
        request["messages"] = [{"role": "user", "content": request.pop("prompt")}]
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=request, timeout=60).json()
    return answer["usage"]["prompt_tokens"], answer["choices"][0]["message"]["content"]
