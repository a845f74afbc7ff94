"""Weights between the backbone, the drafter and the checkpoint that SGLang reads."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_serving.plugin import checkpoint
from osprey_trainer.masks import supervise
from osprey_trainer.models.backbone import Backbone
from osprey_trainer.models.body import Body, Rotary
from osprey_trainer.models.draft import Drafter
from osprey_trainer.models.hf_names import read_embedding
from osprey_trainer.unroll import unroll
from osprey_trainer.vocabulary import DraftVocabulary

LAYER = {
    "input_layernorm.weight": (32,),
    "hidden_norm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
    "self_attn.q_proj.weight": (48, 64),
    "self_attn.k_proj.weight": (24, 64),
    "self_attn.v_proj.weight": (24, 64),
    "self_attn.o_proj.weight": (32, 48),
    "mlp.gate_proj.weight": (40, 32),
    "mlp.up_proj.weight": (40, 32),
    "mlp.down_proj.weight": (32, 40),
}
BOTTOM = {
    "embed_tokens.weight": (64, 32),
    "fc.weight": (32, 72),
    "norm.weight": (32,),
    "lm_head.weight": (48, 32),
    "t2d": (64,),
    "d2t": (48,),
}


def compressed(drafter):
    return drafter.with_draft_vocabulary(DraftVocabulary((torch.arange(64) % 4 != 1).nonzero().flatten(), 64, 1.0))


@pytest.mark.parametrize(("layers", "prefixes"), [(1, ["midlayer."]), (2, ["layers.0.", "layers.1."])])
def test_the_published_checkpoint(trained, tmp_path, layers, prefixes):
    compressed(trained("osprey", layers)).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = BOTTOM | {prefix + name: shape for prefix in prefixes for name, shape in LAYER.items()}
    assert {name: tuple(x.shape) for name, x in tensors.items()} == expected
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["d2t"].dtype == torch.int64

    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["swap_h_and_emb"] is True
    assert config["tie_word_embeddings"] is False
    assert config["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],  # outputs of these are inputs of 2, 3, 4
        "use_aux_hidden_state": True,
    }
    assert (config["vocab_size"], config["draft_vocab_size"]) == (64, 48)
    assert (config["hidden_size"], config["target_hidden_size"], config["head_dim"]) == (32, 24, 12)
    assert config["max_position_embeddings"] == 128
    assert config["num_hidden_layers"] == layers
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500.0
    assert config["rope_scaling"] is None


@pytest.mark.parametrize(("arrangement", "layers"), [("osprey", 1), ("osprey", 2), ("eagle3", 1)])
def test_export_and_reload_give_the_same_drafter(trained, dialogues, tmp_path, arrangement, layers):
    drafter = compressed(trained(arrangement, layers))
    drafter.save(tmp_path)
    reloaded = Drafter.load(tmp_path)
    assert reloaded.config == drafter.config
    assert reloaded.state_dict().keys() == drafter.state_dict().keys()
    for name, value in drafter.state_dict().items():
        assert torch.equal(reloaded.state_dict()[name], value), name
    batch = dialogues((3, 6))
    rows = supervise(batch, drafter.t2d, 2).rows.tolist()
    with torch.no_grad():
        expected = unroll(drafter, batch, rows, 2)
        found = unroll(reloaded, batch, rows, 2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_drafter_is_served_in_its_targets_dtype(target_config, target_folder, tmp_path, field, nested):
    _get_and_verify_dtype = pytest.importorskip("sglang.srt.configs.model_config")._get_and_verify_dtype

    text = {key: value for key, value in target_config.items() if key != "dtype"}
    wide = {field: "bfloat16", "text_config": text} if nested else text | {field: "bfloat16"}
    embedding = read_embedding(target_folder)
    drafter = Drafter.from_scratch(target_config=wide, target_embedding=embedding, tapped_layers=(2, 3, 4), seed=1)
    compressed(drafter).save(tmp_path)
    Drafter.load(tmp_path).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert _get_and_verify_dtype(config, "auto") is torch.bfloat16
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].dtype is torch.float32


def test_a_drafter_that_does_not_fit_the_disk_is_not_begun(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    with pytest.raises(StageError) as error:
        trained("osprey").save(tmp_path)
    assert error.value.reason is FailureReason.OUT_OF_DISK
    assert not list(tmp_path.iterdir())


def test_draft_ids_of_a_compressed_vocabulary(trained):
    drafter = compressed(trained("osprey"))
    ids = [token for token in range(64) if token % 4 != 1]
    assert drafter.draft_ids.tolist() == ids
    assert drafter.t2d.nonzero().flatten().tolist() == ids
    assert drafter.d2t[:4].tolist() == [0, 1, 1, 1]  # 0, 2, 3, 4: offsets, not ids
    with pytest.raises(StageError, match="keeps it for life"):
        compressed(drafter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.hidden_norm.weight"), "missing layers.1.hidden_norm.weight"),
        (lambda t: t.pop("d2t"), "missing d2t"),
        (lambda t: t.update(extra=torch.zeros(1)), "unknown extra"),
        (lambda t: t.update({"fc.weight": torch.zeros(32, 24)}), r"fc.weight has shape \(32, 24\), not \(32, 72\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(trained, tmp_path, change, message):
    compressed(trained("osprey", 2)).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StageError, match=message) as error:
        Drafter.load(tmp_path)
    assert error.value.reason is FailureReason.CORRUPT_ARTIFACT


def test_how_an_osprey_drafter_starts(osprey, source_folder):
    """[0, W], fc identity on the deepest tap, and which norm is which."""
    state = osprey(2).state_dict()
    source = load_file(source_folder / "model.safetensors")
    for layer in range(2):
        for part in "qkv":
            weight = state[f"layers.{layer}.self_attn.{part}_proj.weight"]
            assert not weight[:, :32].any()
            assert torch.equal(weight[:, 32:], source[f"model.layers.{layer}.self_attn.{part}_proj.weight"])
        assert torch.equal(
            state[f"layers.{layer}.hidden_norm.weight"], source[f"model.layers.{layer}.input_layernorm.weight"]
        )
        assert (state[f"layers.{layer}.input_layernorm.weight"] == 1).all()
    fc = torch.zeros(32, 72)
    fc[:24, 48:] = torch.eye(24)
    assert torch.equal(state["fc.weight"], fc)
    assert torch.equal(state["lm_head.weight"], source["model.embed_tokens.weight"])  # it was tied


def test_how_an_eagle3_drafter_starts(target_folder, target_config):
    embedding = read_embedding(target_folder)
    options = {"target_config": target_config, "target_embedding": embedding, "tapped_layers": (2, 3, 4)}
    drafter = Drafter.from_scratch(**options, seed=1)
    assert torch.equal(drafter.embed_tokens.weight, embedding)
    assert drafter.config.body.num_layers == 1
    assert drafter.config.body.hidden_size == 24
    assert 0.01 < drafter.lm_head.weight.std() < 0.03
    assert (drafter.norm.weight == 1).all()
    again, other = (Drafter.from_scratch(**options, seed=seed) for seed in (1, 2))
    assert torch.equal(again.fc.weight, drafter.fc.weight)
    assert not torch.equal(other.fc.weight, drafter.fc.weight)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.language_model.embed_tokens.weight",
        "language_model.model.embed_tokens.weight",
        "lm_head.weight",  # tied
    ],
)
def test_the_embedding_of_a_target_is_known_by_its_name(tmp_path, name):
    embedding = torch.arange(8.0).view(4, 2)
    others = {"model.embed_tokens_per_layer.weight": torch.zeros(1), "model.norm.weight": torch.zeros(1)}
    save_file(others | {name: embedding.bfloat16()}, tmp_path / "model.safetensors")
    save_file({name: torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert torch.equal(read_embedding(tmp_path), embedding)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["a.embed_tokens.weight", "b.embed_tokens.weight"], FailureReason.UNSUPPORTED_MODEL),
        (["model.norm.weight"], FailureReason.CORRUPT_ARTIFACT),
    ],
)
def test_a_target_with_no_one_embedding_is_refused(tmp_path, names, reason):
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(StageError, match=r"embed_tokens\.weight") as error:
        read_embedding(tmp_path)
    assert error.value.reason is reason


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_saved_backbone_is_a_hugging_face_model(make_model, tmp_path, family, tied):
    make_model(tmp_path / "source", family=family, layers=3, hidden=32, seed=4, head_dim=8, tie_word_embeddings=tied)
    backbone = Backbone.prune(tmp_path / "source", 2)
    backbone.save(tmp_path / "backbone")
    ids = torch.arange(20)[None]
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "backbone").eval()
    reloaded = Backbone.load(tmp_path / "backbone")
    with torch.no_grad():
        logits = backbone(ids) @ backbone.head_weight.T
        torch.testing.assert_close(hf(ids, use_cache=False).logits, logits, atol=1e-4, rtol=1e-5)
        assert torch.equal(reloaded(ids), backbone(ids))


def test_a_source_with_an_unknown_tensor_is_refused(make_model, tmp_path):
    make_model(tmp_path, layers=3, hidden=32, seed=4)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StageError, match=r"unknown layers.0.self_attn.q_proj.bias"):
        Backbone.prune(tmp_path, 2)


@pytest.mark.parametrize(("layers", "message"), [(0, "choose 1 to 5"), (6, "choose 1 to 5")])
def test_impossible_pruning(source_folder, layers, message):
    with pytest.raises(StageError, match=message):
        Backbone.prune(source_folder, layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "supported are llama, mistral, qwen2, qwen3"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=True"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "RoPE type 'spiral' is not supported"),
        ({"partial_rotary_factor": 0.5}, "turns only a part of each head"),
    ],
)
def test_bodies_that_are_not_computed_here(target_config, change, message):
    with pytest.raises(StageError, match=message) as error:
        Body.from_hf(target_config | change)
    assert error.value.reason is FailureReason.UNSUPPORTED_MODEL


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("schema", ["new", "old"])
def test_scaled_rope_is_transformers_own_in_both_schemas(make_model, tmp_path, schema):
    make_model(tmp_path, layers=3, hidden=32, seed=4, rope_parameters=LLAMA3 | {"rope_theta": 1000.0})
    hf = LlamaForCausalLM.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if schema == "old":
        del config["rope_parameters"]
        config |= {"rope_theta": 1000.0, "rope_scaling": LLAMA3}
    body = Body.from_hf(config)
    positions = torch.arange(0, 128, 7)
    expected = LlamaRotaryEmbedding(hf.config)(torch.zeros(1), positions[None])
    for found, value in zip(Rotary(body)(positions), expected, strict=True):
        torch.testing.assert_close(found, value[0])
    written = body.to_hf()
    assert written["rope_theta"] == 1000.0
    assert written["rope_scaling"] == LLAMA3
    assert Body.from_hf({k: v for k, v in written.items() if k != "rope_parameters"}) == body


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            "original_max_position_embeddings": 64,
        },
        LLAMA3,
        {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_backbones_with_any_kind_of_rope(make_model, osprey, tmp_path, scaling):
    """As transformers computes them; and a drafter, whose limit is its target's, keeps the angles of its backbone."""
    source = make_model(
        tmp_path / "source",
        layers=2,
        hidden=32,
        seed=4,
        max_position_embeddings=256,
        rope_parameters=scaling | {"rope_theta": 500.0},
    )
    ids = torch.randint(64, (1, 50), generator=torch.Generator().manual_seed(0))
    hf = LlamaForCausalLM.from_pretrained(source).eval()
    backbone = Backbone.load(source)
    with torch.no_grad():
        found = backbone(ids) @ backbone.head_weight.T
        torch.testing.assert_close(found, hf(ids, use_cache=False).logits, atol=1e-4, rtol=1e-4)
    drafter = osprey(2, source)
    assert drafter.config.body.max_position_embeddings == 128
    drafter.save(tmp_path / "drafter")
    written = json.loads((tmp_path / "drafter" / "config.json").read_text())
    positions = torch.arange(60)
    for missing in ("rope_parameters", "rope_scaling"):
        rotary = Rotary(Body.from_hf({key: value for key, value in written.items() if key != missing}))
        for again, value in zip(rotary(positions), backbone.rotary(positions), strict=True):
            torch.testing.assert_close(again, value)


def test_two_schemas_of_rope_must_not_contradict_each_other(target_config):
    with pytest.raises(StageError, match=r"rope_theta: 7\.0, but 500\.0 in rope_parameters") as error:
        Body.from_hf(target_config | {"rope_theta": 7.0})
    assert error.value.reason is FailureReason.INVALID_CONFIG


@pytest.mark.parametrize(
    ("family", "published"),
    [
        ("mistral", ("LlamaForCausalLMEagle3", set())),
        ("qwen2", ("LlamaForCausalLMEagle3", {"q_proj.bias", "k_proj.bias", "v_proj.bias"})),
        ("qwen3", ("Qwen3ForCausalLMEagle3", {"q_norm.weight", "k_norm.weight"})),
    ],
)
def test_the_published_checkpoint_of_other_families(make_model, osprey, tmp_path, family, published):
    architecture, tensors = published
    source = make_model(tmp_path / "source", family=family, layers=2, hidden=32, seed=4, head_dim=8)
    drafter = osprey(2, source)
    drafter.save(tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["architectures"] == [architecture]
    names = load_file(tmp_path / "drafter" / "model.safetensors").keys()
    marked = {name.removeprefix("layers.1.self_attn.") for name in names if name.startswith("layers.1.self_attn.")}
    assert marked == tensors | {f"{part}_proj.weight" for part in "qkvo"}
    assert checkpoint.check(tmp_path / "drafter")["model_type"] == config["model_type"]
    reloaded = Drafter.load(tmp_path / "drafter")
    assert reloaded.config == drafter.config
    assert all(torch.equal(value, reloaded.state_dict()[name]) for name, value in drafter.state_dict().items())


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen3_moe"},
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_theta": 500.0}, "sliding": {}}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}},
    ],
)
def test_eagle3_from_scratch_is_a_llama_block_of_any_targets_sizes(target_config, target_folder, change):
    embedding = read_embedding(target_folder)
    drafter = Drafter.from_scratch(
        target_config=target_config | change, target_embedding=embedding, tapped_layers=(2, 3, 4), seed=1
    )
    body = drafter.config.body
    assert (body.family, body.num_layers, body.hidden_size, body.head_dim) == ("llama", 1, 24, 12)
    assert body.rope == {"rope_type": "default", "rope_theta": 500.0}
