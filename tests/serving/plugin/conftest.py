"""A tiny target and tiny drafters in the published checkpoint format, written with fixed seeds."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

V, DRAFT_V, H, MLP, HEADS, KEY_HEADS, D = 512, 320, 64, 128, 4, 2, 16
TAPS = (1, 2, 3)  # HF's hidden_states[j]: the input of layer j
EPS = 1e-5


def _target(folder):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=MLP, num_hidden_layers=4, num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS, head_dim=D, max_position_embeddings=2048, rms_norm_eps=EPS,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        # The next token depends mostly, not only, on the last one: a drafter with the target's own embedding
        # and head is right about half of the time.
        model.model.embed_tokens.weight *= 5
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.04
            layer.mlp.down_proj.weight *= 0.04
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def write_tokenizer(folder):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = ["<s>", "</s>", *alphabet]
    vocabulary += [f"w{i}" for i in range(V - len(vocabulary))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def write_drafter(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def make_drafter(target, *, osprey, layers, seed, body="llama", scale=0.05, taps=TAPS):
    """Config and tensors, with nearly the target's embedding and head, so that drafts are often right."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator) * scale

    def norm(size):
        return 1 + torch.randn(size, generator=generator) * 0.1

    logits = torch.nn.functional.rms_norm(target.model.embed_tokens.weight, (H,), eps=EPS) @ target.lm_head.weight.T
    likely = logits.detach().argmax(-1).unique()[:DRAFT_V]
    others = [token for token in range(V) if token not in set(likely.tolist())]
    chosen = torch.tensor(sorted(likely.tolist() + others[: DRAFT_V - len(likely)]))
    tensors = {
        "embed_tokens.weight": target.model.embed_tokens.weight.detach().clone(),
        "fc.weight": random(H, 3 * H),
        "norm.weight": norm(H),
        "lm_head.weight": target.lm_head.weight.detach()[chosen],
        "d2t": chosen - torch.arange(DRAFT_V),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, chosen, True),
    }
    key_heads = KEY_HEADS
    for i in range(layers):
        block = "midlayer" if layers == 1 else f"layers.{i}"
        wide = 2 * H if osprey or i == 0 else H
        tensors |= {
            f"{block}.{name}.weight": tensor
            for name, tensor in {
                "input_layernorm": norm(H), "hidden_norm": norm(H), "post_attention_layernorm": norm(H),
                "self_attn.q_proj": random(HEADS * D, wide) * 4, "self_attn.k_proj": random(KEY_HEADS * D, wide) * 4,
                "self_attn.v_proj": random(KEY_HEADS * D, wide), "self_attn.o_proj": random(H, HEADS * D),
                "mlp.gate_proj": random(MLP, H), "mlp.up_proj": random(MLP, H), "mlp.down_proj": random(H, MLP),
            }.items()
        }  # fmt: skip
        if body == "qwen3":
            tensors |= {f"{block}.self_attn.{name}.weight": norm(D) for name in ("q_norm", "k_norm")}
        if body == "qwen2":
            # As large as what the weights give, so that none of the three can be lost unseen.
            sizes = {"q_proj": HEADS * D, "k_proj": KEY_HEADS * D, "v_proj": KEY_HEADS * D}
            tensors |= {f"{block}.self_attn.{name}.bias": random(size) * 40 for name, size in sizes.items()}
    if not osprey:
        # The stream starts as the context, so a right draft needs the embedding through the attention: each
        # token attends to itself, and its normed embedding takes the context's place in the stream.
        key_heads, wanted, eye = HEADS, torch.randn(H, H, generator=generator), torch.eye(H)
        tensors |= {
            "midlayer.self_attn.q_proj.weight": torch.cat([wanted, torch.zeros(H, H)], 1),
            "midlayer.self_attn.k_proj.weight": torch.cat([wanted, torch.zeros(H, H)], 1),
            "midlayer.self_attn.v_proj.weight": torch.cat([eye, torch.zeros(H, H)], 1),
            "midlayer.self_attn.o_proj.weight": eye * 10,
        }
    config = {
        "architectures": ["Qwen3ForCausalLMEagle3" if body == "qwen3" else "LlamaForCausalLMEagle3"],
        "model_type": body,
        "hidden_size": H, "intermediate_size": MLP, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": key_heads, "head_dim": D, "vocab_size": V, "draft_vocab_size": DRAFT_V,
        "target_hidden_size": H, "max_position_embeddings": 2048, "rms_norm_eps": EPS, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        "rope_theta": 10000.0, "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dtype": "float32",
        # SGLang's id i is the output of layer i, which is the input of layer i + 1.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps], "use_aux_hidden_state": True,
        },
        "target_vocabulary_digest": f"sha256:{seed:064}",  # the trainer's own word, which SGLang passes over
    }  # fmt: skip
    if osprey:
        config["swap_h_and_emb"] = True
        embedding = tensors["embed_tokens.weight"]
        embedding += torch.randn(embedding.shape, generator=generator) * 0.4 * embedding.std()
    return config, tensors


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The target (folder and model), prompts, and the drafters: folder, config and tensors by name."""
    root = tmp_path_factory.mktemp("tiny")
    model = _target(root / "target")
    drafters = {}
    for name, options in {
        "osprey": {"osprey": True, "layers": 2, "seed": 1},
        "worse": {"osprey": True, "layers": 2, "seed": 2, "scale": 0.1},
        "eagle3": {"osprey": False, "layers": 1, "seed": 3},
        "qwen3": {"osprey": True, "layers": 2, "seed": 4, "body": "qwen3"},
        "qwen2": {"osprey": True, "layers": 2, "seed": 6, "body": "qwen2"},
    }.items():
        config, tensors = make_drafter(model, **options)
        folder = write_drafter(root / name, config, tensors)
        drafters[name] = SimpleNamespace(folder=folder, config=config, tensors=tensors)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(2, V, (n,), generator=generator).tolist() for n in (3, 7, 12, 20, 33, 50)]
    return SimpleNamespace(
        root=root,
        folder=root / "target",
        model=model,
        prompts=prompts,
        drafters=drafters,
        write_drafter=write_drafter,
    )


@pytest.fixture(scope="session")
def tiny_parts():
    """What `tiny` is made of, for targets of another family."""
    return SimpleNamespace(write_tokenizer=write_tokenizer, make_drafter=make_drafter, write_drafter=write_drafter)
