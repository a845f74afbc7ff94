"""A Gemma 3 target in SGLang on the CPU: sliding windows, and the whole residual stream for the drafter."""

import httpx
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

NEW = 40
TAPS = (1, 3, 4)
"""Inputs of layers; of 4 layers the last one is what the final norm gets."""
EXACT = {"atol": 2e-4, "rtol": 2e-4}


@pytest.fixture(scope="module")
def gemma(tiny_parts, tmp_path_factory):
    """Folder and model of the target; and the folder of a drafter."""
    root = tmp_path_factory.mktemp("gemma3")
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=1, head_dim=32, query_pre_attn_scalar=32, max_position_embeddings=2048, sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        initializer_range=0.2, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).float().eval()
    with torch.no_grad():
        model.model.embed_tokens.weight *= 0.3  # else the tied head repeats the last token for ever
    model.save_pretrained(root / "target")
    tiny_parts.write_tokenizer(root / "target")
    made = tiny_parts.make_drafter(model, osprey=True, layers=2, seed=1, taps=TAPS)
    return root / "target", model, tiny_parts.write_drafter(root / "drafter", *made)


@torch.no_grad()
def answer(model, prompt):
    ids = list(prompt)
    for _ in range(NEW):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def streams(model, prompt):
    """The residual stream before the layers of `TAPS`, side by side."""
    last = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0][0]))
    hidden = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    hook.remove()
    return torch.cat([hidden[TAPS[0]][0], hidden[TAPS[1]][0], *last], dim=-1)


def ask(server, prompt, new):
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
        "return_hidden_states": new == 1,
    }
    response = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    response.raise_for_status()
    return response.json()


def test_the_drafter_gets_the_whole_stream_and_the_output_is_that_of_transformers(gemma, tiny, sglang_server):
    target, model, drafter = gemma
    wanted = [answer(model, prompt) for prompt in tiny.prompts]
    assert all(len(set(ids)) > 3 for ids in wanted)
    with sglang_server(target, drafter, extra_args=("--enable-return-hidden-states",)) as server:
        for prompt in tiny.prompts:
            given, *_ = ask(server, prompt, 1)["meta_info"]["hidden_states"]
            torch.testing.assert_close(torch.tensor(given), streams(model, prompt), **EXACT)
        answers = [ask(server, prompt, NEW) for prompt in tiny.prompts]
    assert [found["output_ids"] for found in answers] == wanted
    # The first token comes without a verification.
    assert sum(found["meta_info"]["spec_verify_ct"] for found in answers) < len(wanted) * (NEW - 1)
