"""The target's states against Hugging Face's own."""

import gc
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, LlamaForCausalLM

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.models.hf_names import read_embedding
from osprey_trainer.models.target import Target, default_tapped_layers


def test_taps_are_inputs_of_the_layers_and_the_last_state_is_normed(target_folder):
    target = Target(target_folder, tapped_layers=(1, 4, 6))
    ids = torch.randint(64, (2, 11), generator=torch.Generator().manual_seed(0))
    states = target.states(ids)
    hf = LlamaForCausalLM.from_pretrained(target_folder).eval()
    with torch.no_grad():
        output = hf(ids, output_hidden_states=True, use_cache=False)
    expected = torch.cat([output.hidden_states[layer] for layer in (1, 4, 6)], dim=-1)
    torch.testing.assert_close(states.taps, expected)
    torch.testing.assert_close(target.head.logits(states.last_hidden), output.logits, atol=1e-4, rtol=1e-5)
    assert torch.equal(target.greedy_tokens(states.last_hidden, chunk=3), output.logits.argmax(-1))


@pytest.fixture(scope="module")
def multimodal_folder(tmp_path_factory):
    """A tiny Gemma 3, which also sees; its config keeps the language model's numbers one level down."""
    text = {
        "vocab_size": 64,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 64,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(0)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=60)
    folder = tmp_path_factory.mktemp("multimodal")
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def test_language_model_of_a_multimodal_target(multimodal_folder):
    target = Target(multimodal_folder)
    assert target.tapped_layers == (1, 2, 3)
    ids = torch.randint(50, (2, 11), generator=torch.Generator().manual_seed(0))
    states = target.states(ids)
    hf = Gemma3ForConditionalGeneration.from_pretrained(multimodal_folder).eval()
    with torch.no_grad():
        logits = hf(ids, use_cache=False).logits
    assert states.taps.shape == (2, 11, 72)
    torch.testing.assert_close(target.head.logits(states.last_hidden), logits, atol=1e-4, rtol=1e-5)
    assert torch.equal(read_embedding(multimodal_folder), hf.get_input_embeddings().weight)


def test_a_target_is_freed_with_its_last_user(target_folder):
    """On a GPU its weights are most of the memory; the cycle collector may not run for hours."""
    target = Target(target_folder)
    target.states(torch.zeros(1, 5, dtype=torch.long))
    gc.collect()
    gc.disable()
    try:
        held = [weakref.ref(target), weakref.ref(target.body.layers[0].self_attn.q_proj.weight)]
        del target
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


def test_padding_on_the_right_changes_no_real_state(target):
    ids = torch.randint(64, (1, 9), generator=torch.Generator().manual_seed(0))
    alone = target.states(ids)
    padded = target.states(torch.cat([ids, torch.zeros(1, 5, dtype=torch.long)], dim=1))
    torch.testing.assert_close(padded.taps[:, :9], alone.taps, atol=5e-4, rtol=1e-4)
    torch.testing.assert_close(padded.last_hidden[:, :9], alone.last_hidden, atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(30, (2, 15, 27)), (36, (2, 18, 33)), (62, (2, 31, 59)), (7, (2, 3, 4)), (4, (1, 2, 3)), (3, (0, 1, 2))],
)
def test_default_taps(layers, expected):
    assert default_tapped_layers(layers) == expected


def test_two_layers_are_too_few():
    with pytest.raises(StageError, match="at least three"):
        default_tapped_layers(2)


@pytest.mark.parametrize("layers", [(2, 2, 3), (3, 2, 4), (1, 2), (0, 3, 7), (-1, 2, 3)])
def test_impossible_taps(target_folder, layers):
    with pytest.raises(StageError, match=r"for example \[2, 3, 4\]") as error:
        Target(target_folder, tapped_layers=layers)
    assert error.value.reason is FailureReason.INVALID_CONFIG


SIZES = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tie_word_embeddings": True, "rope_parameters": YARN}),
        ("llama", {"rope_parameters": DYNAMIC}),
        ("qwen2", {"head_dim": 6}),
        ("qwen3", {}),
        ("qwen3_moe", EXPERTS),
        ("minimax_m2", EXPERTS),
        ("gpt_oss", EXPERTS | {"layer_types": ["full_attention"] * 5}),
        ("gemma2", {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0}),
        ("gemma3_text", {"sliding_window": 4}),
        ("cohere", {"logit_scale": 0.25}),
        ("granite", {"logits_scaling": 4.0}),
        ("falcon_h1", {"lm_head_multiplier": 0.5, "mamba_d_ssm": 24, "mamba_n_heads": 4, "mamba_d_head": 6}),
    ],
)
def test_any_causal_language_model_is_a_target(make_model, tmp_path, family, options):
    make_model(tmp_path, family=family, layers=5, hidden=24, seed=1, **SIZES | options)
    target = Target(tmp_path)
    ids = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
    states = target.states(ids)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        output = hf(ids, output_hidden_states=True, use_cache=False)
    expected = torch.cat([output.hidden_states[layer] for layer in target.tapped_layers], dim=-1)
    torch.testing.assert_close(states.taps, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.head.logits(states.last_hidden), output.logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(target.greedy_tokens(states.last_hidden, chunk=5), output.logits.argmax(-1))
    assert read_embedding(tmp_path).shape == (64, 24)
