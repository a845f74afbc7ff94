"""The plugin in a real SGLang on the CPU: same outputs, the drafts it should make, a live swap."""

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import pytest
import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

NEW = 40


def post(server, path, body, key=None):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def generate(server, prompts):
    """Output ids and verify steps of each prompt, all sent at once."""

    def one(prompt):
        sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
        status, answer = post(server, "/generate", {"input_ids": prompt, "sampling_params": sampling})
        assert status == 200, answer
        return answer["output_ids"], answer["meta_info"].get("spec_verify_ct")

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


@pytest.fixture(scope="module")
def greedy(tiny):
    """What transformers answers, greedily, to each prompt."""
    answers = []
    for prompt in tiny.prompts:
        ids = list(prompt)
        for _ in range(NEW):
            with torch.no_grad():
                ids.append(int(tiny.model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


class SlowDrafter:
    """An Osprey drafter as plain as it can be: everything is computed again for every drafted token."""

    def __init__(self, drafter, eps=1e-5):
        self.config, self.t, self.eps = drafter.config, drafter.tensors, eps
        self.target_ids = self.t["d2t"] + torch.arange(len(self.t["d2t"]))

    def norm(self, x, name):
        weight = self.t[f"{name}.weight"]
        return rms_norm(x, weight.shape, weight, self.eps)

    def rotate(self, x):
        D = x.shape[-1]
        frequency = self.config["rope_theta"] ** (-torch.arange(0, D, 2) / D)
        angle = torch.arange(x.shape[1])[:, None] * frequency
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    def heads(self, x, name, norm):
        D = self.config["head_dim"]
        x = linear(x, self.t[f"{name}_proj.weight"])
        x = x.view(x.shape[0], -1, D).transpose(0, 1)
        return self.norm(x, f"{name}_norm") if norm else x

    def streams(self, contexts, tokens):
        """The last layer's stream of each row, before the norm: [rows, H]."""
        x = self.t["embed_tokens.weight"][tokens]
        normed_heads = self.config["architectures"][0].startswith("Qwen3")
        for i in range(self.config["num_hidden_layers"]):
            block = f"layers.{i}"
            pair = torch.cat(
                [self.norm(contexts, f"{block}.input_layernorm"), self.norm(x, f"{block}.hidden_norm")], -1
            )
            q = self.rotate(self.heads(pair, f"{block}.self_attn.q", normed_heads))
            k = self.rotate(self.heads(pair, f"{block}.self_attn.k", normed_heads))
            v = self.heads(pair, f"{block}.self_attn.v", norm=False)
            attended = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
            x = x + linear(attended.transpose(0, 1).flatten(1), self.t[f"{block}.self_attn.o_proj.weight"])
            y = self.norm(x, f"{block}.post_attention_layernorm")
            y = silu(linear(y, self.t[f"{block}.mlp.gate_proj.weight"])) * linear(
                y, self.t[f"{block}.mlp.up_proj.weight"]
            )
            x = x + linear(y, self.t[f"{block}.mlp.down_proj.weight"])
        return x

    def verify_steps(self, target, prompt, answer, chain=5):
        """How many verifications the answer takes: each accepts a prefix of the chain and adds one token."""
        ids = prompt + answer
        taps = [i + 1 for i in self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        with torch.no_grad():
            hidden = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
        features = linear(torch.cat([hidden[j][0] for j in taps], -1), self.t["fc.weight"])
        known, steps = len(prompt) + 1, 0  # the prefill gives the first token
        while known < len(ids):
            # Row i has the hidden state of token i and the token after it.
            contexts, tokens = features[: known - 1], ids[1:known]
            accepted = 0
            for k in range(chain):
                stream = self.streams(contexts, torch.tensor(tokens))[-1:]
                logits = linear(self.norm(stream, "norm"), self.t["lm_head.weight"])
                draft = int(self.target_ids[logits.argmax()])
                if known + k >= len(ids) or draft != ids[known + k]:
                    break
                accepted += 1
                contexts, tokens = torch.cat([contexts, stream]), [*tokens, draft]
            known += accepted + 1
            steps += 1
        return steps


def expected_steps(tiny, name, greedy):
    slow = SlowDrafter(tiny.drafters[name])
    return [slow.verify_steps(tiny.model, prompt, answer) for prompt, answer in zip(tiny.prompts, greedy, strict=True)]


def test_without_a_drafter_the_output_is_that_of_transformers(tiny, greedy, sglang_server):
    with sglang_server(tiny.folder) as server:
        assert [ids for ids, _ in generate(server, tiny.prompts)] == greedy
        with urllib.request.urlopen(f"{server.url}/server_info", timeout=30) as response:
            states = json.load(response)["internal_states"]
        assert [state["osprey_plugin"] for state in states] == [version("osprey-serving")]


def test_osprey_drafter_drafts_as_computed_slowly_and_is_swapped_live(tiny, greedy, sglang_server):
    key = "k"
    first, second = (expected_steps(tiny, name, greedy) for name in ("osprey", "worse"))
    assert sum(first) < sum(second)  # else the test below shows nothing
    with sglang_server(tiny.folder, tiny.drafters["osprey"].folder, admin_key=key) as server:
        answers = generate(server, tiny.prompts)
        assert [ids for ids, _ in answers] == greedy
        assert [steps for _, steps in answers] == first

        def swap(folder, key=key):
            body = {"model_path": f"draft:{folder}", "weight_version": "2"}
            return post(server, "/update_weights_from_disk", body, key)

        assert swap(tiny.drafters["worse"].folder, key=None)[0] == 401
        status, answer = swap(tiny.drafters["worse"].folder)
        assert (status, answer["success"]) == (200, True), answer
        answers = generate(server, tiny.prompts)
        assert [ids for ids, _ in answers] == greedy
        assert [steps for _, steps in answers] == second
