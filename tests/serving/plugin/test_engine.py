"""The plugin in a real SGLang on the CPU: same outputs, the drafts it should make, a live swap."""

from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from types import SimpleNamespace

import httpx
import pytest
import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

NEW = 40


def post(server, path, body, key=None):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=60)


def generate(server, prompts):
    """Output ids and verify steps of each prompt, all sent at once."""

    def one(prompt):
        sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
        answer = post(server, "/generate", {"input_ids": prompt, "sampling_params": sampling}).json()
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
        x = linear(x, self.t[f"{name}_proj.weight"], self.t.get(f"{name}_proj.bias"))
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


@pytest.fixture(scope="module")
def steps(tiny, greedy):
    """Verify steps of each prompt with a drafter, computed slowly."""

    def compute(name):
        slow = SlowDrafter(tiny.drafters[name])
        return [slow.verify_steps(tiny.model, *pair) for pair in zip(tiny.prompts, greedy, strict=True)]

    return compute


def test_without_a_drafter_the_output_is_that_of_transformers(tiny, greedy, sglang_server):
    with sglang_server(tiny.folder) as server:
        assert [ids for ids, _ in generate(server, tiny.prompts)] == greedy
        states = httpx.get(f"{server.url}/server_info", timeout=30).json()["internal_states"]
        assert [state["osprey_plugin"] for state in states] == [version("osprey-serving")]


def test_osprey_drafter_drafts_as_computed_slowly_and_is_swapped_live(tiny, greedy, steps, sglang_server):
    before, after = steps("osprey"), steps("worse")
    assert sum(before) < sum(after)  # else the swap below shows nothing
    key = "-admin"  # as one of 64 random keys begins

    def update(path, key=key):
        return post(server, "/update_weights_from_disk", {"model_path": path, "weight_version": "2"}, key)

    with sglang_server(tiny.folder, tiny.drafters["osprey"].folder, admin_key=key) as server:
        assert generate(server, tiny.prompts) == list(zip(greedy, before, strict=True))

        worse = tiny.drafters["worse"]
        shifted = dict(worse.tensors, d2t=worse.tensors["d2t"].clone())
        shifted["d2t"][-1] -= 1
        fewer = {name: tensor for name, tensor in worse.tensors.items() if name != "fc.weight"}
        for folder, sentence in {
            f"draft:{tiny.write_drafter(tiny.root / 'shifted', worse.config, shifted)}": "draft vocabulary (d2t)",
            f"draft:{tiny.write_drafter(tiny.root / 'fewer', worse.config, fewer)}": "fc.weight is missing",
            f"draft:{tiny.drafters['eagle3'].folder}": "swap_h_and_emb: None",
            f"draft:{tiny.folder}": "architectures: ['LlamaForCausalLM']",
            "draft:/nowhere": "it has no config.json",
            str(worse.folder): f"write draft:{worse.folder}",
            str(tiny.folder): "not updated in place",
        }.items():
            answer = update(folder)
            assert answer.status_code == 400
            assert sentence in answer.json()["message"]
        assert update(f"draft:{worse.folder}", key=None).status_code == 401
        assert generate(server, tiny.prompts) == list(zip(greedy, before, strict=True))

        answer = update(f"draft:{worse.folder}")
        assert answer.status_code == 200, answer.text
        assert generate(server, tiny.prompts) == list(zip(greedy, after, strict=True))
        assert httpx.get(f"{server.url}/model_info", timeout=30).json()["weight_version"] == "2"


def test_eagle3_is_sglangs_own_and_a_swap_leaves_the_targets_embedding_alone(tiny, greedy, sglang_server):
    drafter = tiny.drafters["eagle3"]
    other = {name: torch.randn_like(tensor) if tensor.is_floating_point() else tensor
             for name, tensor in drafter.tensors.items()}  # fmt: skip
    folder = tiny.write_drafter(tiny.root / "eagle3-other", drafter.config, other)
    tree = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6")
    with sglang_server(tiny.folder, drafter.folder, extra_args=tree) as server:
        answers = generate(server, tiny.prompts)
        assert [ids for ids, _ in answers] == greedy
        assert sum(steps for _, steps in answers) < 0.9 * len(greedy) * (NEW - 1)  # some drafts are right
        answer = post(server, "/update_weights_from_disk", {"model_path": f"draft:{folder}"})
        assert answer.status_code == 200, answer.text
        assert [ids for ids, _ in generate(server, tiny.prompts)] == greedy


@pytest.mark.parametrize("body", ["qwen2", "qwen3"])
def test_other_bodies_draft_as_computed_slowly(tiny, greedy, steps, sglang_server, body):
    with sglang_server(tiny.folder, tiny.drafters[body].folder) as server:
        assert generate(server, tiny.prompts) == list(zip(greedy, steps(body), strict=True))


@pytest.mark.parametrize("lost", ["q_proj.bias", "k_proj.bias", "v_proj.bias", "embed_tokens.weight"])
def test_a_lost_bias_or_embedding_changes_the_verify_steps(tiny, greedy, steps, lost):
    """Without this, the test above could not tell a tensor that is read from one that is not."""
    whole = tiny.drafters["qwen2"]
    instead = {"embed_tokens.weight": tiny.model.model.embed_tokens.weight.detach()}  # as SGLang's own drafters get it
    tensors = {
        name: instead.get(lost, torch.zeros_like(tensor)) if name.endswith(lost) else tensor
        for name, tensor in whole.tensors.items()
    }
    slow = SlowDrafter(SimpleNamespace(config=whole.config, tensors=tensors))
    without = [slow.verify_steps(tiny.model, *pair) for pair in zip(tiny.prompts, greedy, strict=True)]
    assert without != steps("qwen2")


def test_wrong_checkpoint_ends_the_server_with_64_and_a_sentence(tiny, sglang_server, server_did_not_start):
    drafter = tiny.drafters["osprey"]
    tensors = dict(drafter.tensors, extra=torch.zeros(1))
    del tensors["layers.1.hidden_norm.weight"]
    folder = tiny.write_drafter(tiny.root / "wrong", drafter.config, tensors)
    with pytest.raises(server_did_not_start) as error, sglang_server(tiny.folder, folder):
        pass
    assert error.value.returncode == 64
    assert f"osprey plugin: {folder}: the drafter's tensors do not fit" in str(error.value)
    assert "layers.1.hidden_norm.weight is missing; extra is unknown" in str(error.value)


def test_wrong_checkpoint_from_the_hub_ends_the_server_too(
    tiny, tmp_path, sglang_server, server_did_not_start, monkeypatch
):
    """A hub name is no folder that could be checked early: the drafter's class does it."""
    drafter = tiny.drafters["osprey"]
    tensors = {name: tensor for name, tensor in drafter.tensors.items() if name != "norm.weight"}
    cached = tmp_path / "hub" / "models--org--drafter"
    tiny.write_drafter(cached / "snapshots" / "0", drafter.config, tensors)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(server_did_not_start) as error, sglang_server(tiny.folder, "org/drafter"):
        pass
    assert error.value.returncode not in {0, None}
    assert "osprey plugin: the drafter's tensors do not fit its config.json: norm.weight is missing" in str(error.value)
