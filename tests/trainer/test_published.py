"""Drafters and the backbone as they were released: their layouts, scaled down, load and are written unchanged."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_serving.plugin import checkpoint
from osprey_trainer.masks import supervise
from osprey_trainer.models.backbone import Backbone
from osprey_trainer.models.draft import Arrangement, Drafter
from osprey_trainer.models.target import Target
from osprey_trainer.unroll import unroll

# Sizes stand for: 2560 hidden, 32 x 128 heads, 8 of keys, 9728 inside; only the last is no multiple of the first.
QWEN3_4B = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 40,
    "initializer_range": 0.02,
    "intermediate_size": 72,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
}
DRAFTER = QWEN3_4B | {
    "architectures": ["Qwen3ForCausalLMEagle3"],
    "pretraining_tp": 1,
    "swap_h_and_emb": True,
    "tie_word_embeddings": False,
}
ON_QWEN3_8B = {"vocab_size": 96, "target_hidden_size": 64, "bos_token_id": 90, "eos_token_id": 92}
RELEASED = {
    **{f"qwen3-8b/osprey-{domain}": ON_QWEN3_8B for domain in ("chat", "code", "commonsense", "finance", "math")},
    "llama33-70b/osprey": {
        "vocab_size": 80,
        "target_hidden_size": 128,
        "bos_token_id": 70,
        "eos_token_id": [71, 78, 79],
        "pad_token_id": 74,
    },
    "minimax-m25/osprey": {
        "vocab_size": 104,
        "target_hidden_size": 48,
        "bos_token_id": 100,
        "eos_token_id": 101,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 30, 58], "use_aux_hidden_state": True},
    },
}
LLAMA_4_LAYERS = {  # of the second backbone, cut from LayerSkip-Llama-3.2-1B
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "head_dim": 10,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "mlp_bias": False,
}


def drafter_shapes(config):
    """Names and shapes, written down once more: the package has its own list."""
    hidden, inner, rows = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    drafted = config.get("draft_vocab_size") or rows
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {
        "embed_tokens.weight": (rows, hidden),
        "fc.weight": (hidden, 3 * config.get("target_hidden_size", hidden)),
        "norm.weight": (hidden,),
        "lm_head.weight": (drafted, hidden),
    }
    layers = config["num_hidden_layers"]
    for prefix in ["midlayer"] if layers == 1 else [f"layers.{layer}" for layer in range(layers)]:
        shapes |= {
            f"{prefix}.hidden_norm.weight": (hidden,),
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (queries, 2 * hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, 2 * hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, 2 * hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
        if config["architectures"] == ["Qwen3ForCausalLMEagle3"]:
            shapes |= {f"{prefix}.self_attn.{part}_norm.weight": (head_dim,) for part in "qk"}
    return shapes


def write(folder, config, shapes):
    """Random weights in bfloat16, and the full vocabulary or every other token."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    if "fc.weight" in tensors:
        rows, drafted = config["vocab_size"], len(tensors["lm_head.weight"])
        ids = torch.arange(rows) if drafted == rows else torch.arange(0, 2 * drafted, 2)
        tensors["d2t"] = ids - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(rows, dtype=torch.bool).index_fill(0, ids, value=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((name, DRAFTER | {"draft_vocab_size": rest["vocab_size"]} | rest) for name, rest in RELEASED.items()),
        ("llama-4-layers", DRAFTER | LLAMA_4_LAYERS | {"draft_vocab_size": 40} | ON_QWEN3_8B),
    ],
)
def test_released_drafters_load_and_are_written_unchanged(tmp_path, name, config):
    tensors = write(tmp_path / name, config, drafter_shapes(config))
    assert checkpoint.check(tmp_path / name) == config  # and SGLang is given them as they are
    drafter = Drafter.load(tmp_path / name)
    assert drafter.config.arrangement is Arrangement.OSPREY
    named = config.get("eagle_config")
    assert drafter.config.tapped_layers == ((2, 31, 59) if named else None)

    drafter.save(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key], tensors[key].to(again[key].dtype)) for key in tensors)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    same = {key: value for key, value in config.items() if key in written}
    assert {key: written[key] for key in same} == same
    told = {"attention_dropout", "initializer_range", "max_window_layers", "pretraining_tp", "sliding_window"}
    assert config.keys() - same.keys() <= told | {
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "use_sliding_window",
    }
    assert (written.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") == (named and [1, 30, 58])
    assert written["dtype"] == "bfloat16"


def test_a_drafter_without_layer_ids_taps_its_targets_default_ones(tmp_path, target_folder):
    config = DRAFTER | {"vocab_size": 64, "target_hidden_size": 24}
    write(tmp_path / "drafter", config, drafter_shapes(config))
    tapped = Drafter.load(tmp_path / "drafter").config.tapped_layers
    assert Target(target_folder, tapped_layers=tapped).tapped_layers == (2, 3, 4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [True, False])
def test_the_released_backbone(tmp_path, tied, head):
    """Qwen3-4B ties its head; whether a file repeats it, or has trained it apart, its config does not tell."""
    config = QWEN3_4B | {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 96,
        "tie_word_embeddings": tied,
        "layer_types": ["full_attention"] * 36,
    }
    shapes = {
        f"model.{name}": (*shape[:1], shape[1] // 2) if name.split(".")[-2] in {"q_proj", "k_proj", "v_proj"} else shape
        for name, shape in drafter_shapes(config | {"architectures": ["Qwen3ForCausalLMEagle3"]}).items()
        if "hidden_norm" not in name and name not in {"fc.weight", "lm_head.weight"}
    }
    tensors = write(tmp_path / "backbone", config, shapes | ({"lm_head.weight": (96, 40)} if head else {}))
    if not tied and not head:
        with pytest.raises(StageError, match=r"missing lm_head\.weight"):
            Backbone.load(tmp_path / "backbone")
        return
    backbone = Backbone.load(tmp_path / "backbone")
    expected = tensors["lm_head.weight" if head else "model.embed_tokens.weight"]
    assert torch.equal(backbone.head_weight, expected.float())
    backbone.save(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], value.float()) for name, value in tensors.items())
    ids = torch.arange(20)[None]
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        found = backbone(ids) @ backbone.head_weight.T
        torch.testing.assert_close(hf(ids, use_cache=False).logits, found, atol=1e-3, rtol=1e-4)


# Hand-written configs, as those for Phi-4-mini: a Llama drafter that calls itself phi3, tied, one id for three roles.
PHI = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "bos_token_id": 63,
    "eos_token_id": 63,
    "pad_token_id": 63,
    "hidden_act": "silu",
    "hidden_size": 24,
    "intermediate_size": 64,
    "max_position_embeddings": 131072,
    "model_type": "phi3",
    "num_attention_heads": 6,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 64,
}


def test_gaps_and_slips_of_a_config_are_mended_with_a_notice(tmp_path, caplog):
    write(tmp_path / "phi", PHI, drafter_shapes(PHI))
    with caplog.at_level(logging.WARNING):
        drafter = Drafter.load(tmp_path / "phi")
    (notice,) = caplog.messages
    assert notice.startswith("config.json of phi: model_type is 'phi3', but a LlamaForCausalLMEagle3 is a llama; ")
    for words in ("tie_word_embeddings is true", "no target_hidden_size", "no draft_vocab_size", "default ones"):
        assert words in notice
    config = drafter.config
    assert config.arrangement is Arrangement.EAGLE3
    assert (config.body.family, config.body.head_dim) == ("llama", 4)
    assert (config.target_hidden_size, config.draft_vocab_size, config.tapped_layers) == (24, 64, None)
    drafter.save(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (written["model_type"], written["tie_word_embeddings"]) == ("llama", False)
    caplog.clear()
    Drafter.load(tmp_path / "again")
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "no tapped layers are named, so they are the target's default ones"
    ]


def test_an_end_token_that_also_pads_is_learned(tmp_path, dialogues):
    write(tmp_path / "phi", PHI, drafter_shapes(PHI))
    drafter = Drafter.load(tmp_path / "phi")
    batch = dialogues((3, 6))
    batch.ids[4] = 63
    rows = supervise(batch, drafter.t2d, 2).rows.tolist()
    sum(normed.square().sum() for normed in unroll(drafter, batch, rows, 2)).backward()
    assert drafter.embed_tokens.weight.grad[63].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLMEagle"]}, "phi is a LlamaForCausalLMEagle; drafters that can be read are"),
        ({"architectures": None}, "phi is a model without an architecture"),
        ({"norm_before_residual": True}, "says norm_before_residual: True; only False"),
        ({"eagle_config": {"norm_before_fc": True}}, "says norm_before_fc: True; only False"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "says use_aux_hidden_state: False; only True"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(tmp_path, change, message):
    write(tmp_path / "phi", PHI | change, drafter_shapes(PHI))
    with pytest.raises(StageError, match=message) as error:
        Drafter.load(tmp_path / "phi")
    assert error.value.reason is FailureReason.UNSUPPORTED_MODEL


@pytest.mark.parametrize(
    "d2t",
    [
        torch.arange(0, 64, 2),  # ids in place of offsets
        torch.zeros(32, dtype=torch.long),
        torch.arange(32).flip(0) * 2 - torch.arange(32),
    ],
)
def test_maps_that_contradict_each_other_are_refused(tmp_path, d2t):
    config = PHI | {"draft_vocab_size": 32}
    tensors = write(tmp_path / "phi", config, drafter_shapes(config))
    Drafter.load(tmp_path / "phi")
    save_file(tensors | {"d2t": d2t}, tmp_path / "phi" / "model.safetensors")
    with pytest.raises(StageError, match="contradicts itself") as error:
        Drafter.load(tmp_path / "phi")
    assert error.value.reason is FailureReason.CORRUPT_ARTIFACT
