"""What is refused before SGLang loads anything."""

import pytest
import torch

from osprey_serving.plugin import checkpoint


@pytest.fixture
def drafter(tiny):
    return tiny.drafters["osprey"]


@pytest.mark.parametrize("name", ["osprey", "worse", "qwen2", "qwen3"])
def test_a_good_drafter_passes(tiny, name):
    drafter = tiny.drafters[name]
    assert checkpoint.check(drafter.folder) == drafter.config
    ids = drafter.tensors["d2t"] + torch.arange(len(drafter.tensors["d2t"]))
    assert checkpoint.target_ids(drafter.folder) == ids.tolist()


def test_one_layer_is_called_midlayer(drafter):
    names = checkpoint.expected_tensors(drafter.config | {"num_hidden_layers": 1})
    assert "midlayer.self_attn.q_proj.weight" in names
    assert not any(name.startswith("layers.") for name in names)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": 128}, r"embed_tokens.weight has shape \[512, 64\] instead of \[512, 128\]"),
        ({"num_hidden_layers": 1}, r"midlayer\..* is missing; .* more"),
        ({"attention_bias": True}, "says attention_bias: true"),
        ({"tie_word_embeddings": True}, "says tie_word_embeddings: true"),
        ({"num_attention_heads": None}, "lacks num_attention_heads"),
        ({"draft_vocab_size": None}, r"lm_head.weight has shape \[320, 64\] instead of \[512, 64\]"),
        ({"architectures": ["Qwen3ForCausalLMEagle3"]}, r"layers.0.self_attn.k_norm.weight is missing"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2]}}, "as wide as the drafter"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tiny, tmp_path, drafter, change, sentence):
    folder = tiny.write_drafter(tmp_path, drafter.config | change, drafter.tensors)
    with pytest.raises(checkpoint.CheckpointError, match=sentence):
        checkpoint.check(folder)


def test_d2t_must_stay_inside_the_targets_vocabulary(tiny, tmp_path, drafter):
    d2t = drafter.tensors["d2t"].clone()
    d2t[-1] = 512
    folder = tiny.write_drafter(tmp_path, drafter.config, drafter.tensors | {"d2t": d2t})
    with pytest.raises(checkpoint.CheckpointError, match="outside the target's vocabulary"):
        checkpoint.check(folder)
    folder = tiny.write_drafter(tmp_path, drafter.config, drafter.tensors | {"d2t": d2t.int()})
    with pytest.raises(checkpoint.CheckpointError, match="d2t is I32 instead of int64"):
        checkpoint.check(folder)


@pytest.mark.parametrize("name", ["d2t", "t2d"])
def test_only_a_drafter_with_the_whole_vocabulary_may_lack_d2t(tiny, tmp_path, drafter, name):
    tensors = {key: tensor for key, tensor in drafter.tensors.items() if key != name}
    folder = tiny.write_drafter(tmp_path, drafter.config, tensors)
    if name == "d2t":
        with pytest.raises(checkpoint.CheckpointError, match="d2t is missing"):
            checkpoint.check(folder)
    else:
        checkpoint.check(folder)
    whole = {"lm_head.weight": torch.zeros(512, 64), "t2d": torch.ones(512, dtype=torch.bool)}
    tensors = {key: tensor for key, tensor in (drafter.tensors | whole).items() if key != "d2t"}
    folder = tiny.write_drafter(tmp_path, drafter.config | {"draft_vocab_size": 512}, tensors)
    checkpoint.check(folder)
    assert checkpoint.target_ids(folder) is None


def test_sizes_that_follow_from_others_may_be_left_out(drafter):
    config = {key: value for key, value in drafter.config.items() if key not in {"head_dim", "num_key_value_heads"}}
    assert checkpoint.expected_tensors(config | {"num_key_value_heads": 2}) == checkpoint.expected_tensors(
        drafter.config
    )
    assert checkpoint.expected_tensors(config)["layers.0.self_attn.k_proj.weight"] == (64, 128)


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_cut_file_is_refused(tiny, tmp_path, drafter, size):
    folder = tiny.write_drafter(tmp_path, drafter.config, drafter.tensors)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(checkpoint.CheckpointError, match=r"safetensors file|cut off"):
        checkpoint.check(folder)


def test_a_folder_that_is_no_drafter_is_refused(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match=r"no config\.json"):
        checkpoint.check(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(checkpoint.CheckpointError, match="not JSON"):
        checkpoint.check(tmp_path)
