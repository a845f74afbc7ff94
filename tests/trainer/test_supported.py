"""What is refused by its config alone, and what is not."""

import pytest
from transformers import CONFIG_MAPPING, BartConfig, GPT2Config, T5Config

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.models.supported import check_backbone, check_target

SIZES = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def config_of(family, architecture, **more):
    return CONFIG_MAPPING[family](**SIZES | EXPERTS).to_dict() | {"architectures": [architecture]} | more


LLAMA = config_of("llama", "LlamaForCausalLM")


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("llama", "LlamaForCausalLM"),
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
        ("minimax_m2", "MiniMaxM2ForCausalLM"),
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("gpt_oss", "GptOssForCausalLM"),
        ("mixtral", "MixtralForCausalLM"),
    ],
)
@pytest.mark.parametrize("quantisation", [None, FP8])
def test_targets_that_transformers_runs(family, architecture, quantisation):
    """MiniMax-M2 is published in FP8, with code of its own that nobody needs any more."""
    more = {} if quantisation is None else {"quantization_config": quantisation, "auto_map": {"AutoConfig": "x.Y"}}
    check_target("hf://a/b", config_of(family, architecture, **more))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config().to_dict() | {"architectures": ["T5ForConditionalGeneration"]}, "is a T5ForConditionalGeneration"),
        (BartConfig().to_dict() | {"architectures": ["BartForCausalLM"]}, "is a BartForCausalLM"),
        (GPT2Config().to_dict() | {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel whose layers cannot be"),
        (LLAMA | {"architectures": None}, "is a model without an architecture"),
        (LLAMA | {"architectures": ["OwlForCausalLM"], "auto_map": {}}, "is a OwlForCausalLM"),
        (
            LLAMA | {"architectures": ["OwlForCausalLM"], "auto_map": {"AutoConfig": "owl.Owl"}},
            r"code of its own \(auto_map\) is not run",
        ),
        (LLAMA | {"quantization_config": GPTQ}, r"quantised \(gptq\), which this image cannot run: .*optimum"),
        (LLAMA | {"quantization_config": {"quant_method": "feathers"}}, r"quantised \(feathers\)"),
        (LLAMA | {"text_config": {"quantization_config": GPTQ}}, r"quantised \(gptq\)"),
    ],
)
def test_targets_that_are_refused_by_name(config, message):
    with pytest.raises(StageError, match=message) as error:
        check_target("hf://a/b", config)
    assert error.value.reason is FailureReason.UNSUPPORTED_MODEL
    assert "hf://a/b" in error.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "is a GPT2LMHeadModel; a backbone can be cut from a LlamaForCausalLM"),
        ({"quantization_config": FP8}, r"quantised \(fp8\); a backbone is trained on"),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64}, "sliding-window"),
        ({"mlp_bias": True}, "mlp_bias=True"),
    ],
)
def test_sources_of_backbones_that_are_refused_by_name(change, message):
    check_backbone("hf://a/b", LLAMA)
    with pytest.raises(StageError, match=message) as error:
        check_backbone("hf://a/b", LLAMA | change)
    assert error.value.reason is FailureReason.UNSUPPORTED_MODEL
