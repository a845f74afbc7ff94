"""Quantised targets: run where this machine can, else refused by name before a weight is read."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer.models.supported import check_runs_here, check_target
from osprey_trainer.models.target import Target

CPU = torch.device("cpu")
BLOCK = 8
LLAMA = {"hidden_size": 24, "intermediate_size": 40, "head_dim": 12}
GPT_OSS = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["full_attention"] * 4,
}


def fp8(name, weight):
    """Weights in blocks, each with a scale, as DeepSeek's, Qwen's and MiniMax's."""
    if "proj" not in name:
        return {name: weight}, weight
    rows, columns = weight.shape
    blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).transpose(1, 2)
    scale = blocks.abs().amax((2, 3)) / 448
    packed = (blocks / scale[..., None, None]).to(torch.float8_e4m3fn)
    plain = (packed.float() * scale[..., None, None]).transpose(1, 2).reshape(rows, columns)
    return {name: packed.transpose(1, 2).reshape(rows, columns), f"{name}_scale_inv": scale}, plain


def mxfp4(name, weight):
    """Experts in four bits, 32 to a scale, as gpt-oss's."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: weight}, weight
    experts, inner, outer = weight.shape
    generator = torch.Generator().manual_seed(len(name))
    blocks = torch.randint(256, (experts, outer, inner // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 124, (experts, outer, inner // 32), dtype=torch.uint8, generator=generator)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, convert_moe_packed_tensors(blocks, scales).float()


def compressed(name, weight):
    """Weights in FP8 with a scale for each row, as llm-compressor's."""
    if "proj" not in name:
        return {name: weight}, weight
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16().float()  # in which it is unpacked under BF16
    packed = (weight / scale).to(torch.float8_e4m3fn)
    return {name: packed, f"{name}_scale": scale}, packed.float() * scale


EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
RUNS = {
    "fp8": ("llama", LLAMA, fp8, {"weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}),
    "mxfp4": ("gpt_oss", GPT_OSS, mxfp4, {"modules_to_not_convert": ["lm_head"]}),
    "compressed-tensors": (
        "llama",
        LLAMA,
        compressed,
        {
            "format": "float-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": EIGHT_BITS | {"strategy": "channel", "dynamic": False},
                }
            },
        },
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", RUNS)
def test_what_can_be_unpacked_runs_like_the_model_it_stands_for(make_model, tmp_path, method, dtype):
    family, sizes, pack, options = RUNS[method]
    make_model(tmp_path / "plain", family=family, layers=4, seed=1, **{"hidden": 24} | rename(sizes))
    folder = shutil.copytree(tmp_path / "plain", tmp_path / "packed")
    packed, plain = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored, plain[name] = pack(name, weight)
        packed |= {key: value.contiguous() for key, value in stored.items()}
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({name: weight.contiguous() for name, weight in plain.items()}, tmp_path / "plain" / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    quantise(folder, quant_method=method, **options)

    check_target("hf://a/b", json.loads((folder / "config.json").read_text()))
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    found, wanted = (Target(path, dtype=dtype) for path in (folder, tmp_path / "plain"))
    assert found.head.weight.dtype == dtype
    one, other = found.states(ids), wanted.states(ids)
    torch.testing.assert_close(one.taps, other.taps)
    torch.testing.assert_close(one.last_hidden, other.last_hidden)


def rename(sizes):
    return {"hidden" if name == "hidden_size" else name: value for name, value in sizes.items()}


def quantise(folder, **quantisation):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantisation}))


REFUSED = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes, load_in_8bit": {"load_in_8bit": True},
    "feathers": {"quant_method": "feathers"},
}


@pytest.mark.parametrize("method", REFUSED)
def test_what_lacks_a_package_is_refused_before_its_weights_are_read(target_folder, tmp_path, method):
    folder = shutil.copytree(target_folder, tmp_path / "model")
    quantise(folder, **REFUSED[method])
    (folder / "model.safetensors").unlink()
    for check in (
        lambda: check_target("hf://a/b", json.loads((folder / "config.json").read_text())),  # in resolve
        lambda: Target(folder),  # in the pod that runs it
    ):
        with pytest.raises(StageError, match=r"Name the same model in floating point, or use an image with") as error:
            check()
        assert error.value.reason is FailureReason.UNSUPPORTED_MODEL
        assert f"quantised ({method})" in error.value.message


def test_what_lacks_a_gpu_is_refused_where_it_is_to_run_and_not_before(target_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    folder = shutil.copytree(target_folder, tmp_path / "model")
    quantise(folder, quant_method="fp_quant", forward_dtype="mxfp4")
    (folder / "model.safetensors").unlink()
    check_target("hf://a/b", json.loads((folder / "config.json").read_text()))  # the trainer's pods may have one
    with pytest.raises(
        StageError, match=r"\(fp_quant\), which this machine cannot run: .* on GPU .* \(job\.gpusPerNode\)"
    ) as error:
        Target(folder)
    assert error.value.reason is FailureReason.UNSUPPORTED_MODEL


def test_what_breaks_only_when_it_is_loaded_is_told_too(target_folder, tmp_path, monkeypatch):
    folder = shutil.copytree(target_folder, tmp_path / "model")
    quantise(folder, quant_method="fp8", weight_block_size=[8, 8])

    def load(*_args, **_options):
        raise ImportError("no kernels")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(StageError, match=r"cannot be loaded on this machine \(ImportError: no kernels\)") as error:
        Target(folder)
    assert error.value.reason is FailureReason.UNSUPPORTED_MODEL


@pytest.mark.parametrize("method", sorted(AUTO_QUANTIZER_MAPPING))
def test_whatever_the_method_nothing_else_is_raised(target_folder, method):
    """However little its config says."""
    config = json.loads((target_folder / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
    for check in (lambda: check_target("hf://a/b", config), lambda: check_runs_here("b", config, CPU)):
        refused = []
        try:
            check()
        except StageError as error:
            refused.append(error)
        assert all(error.reason is FailureReason.UNSUPPORTED_MODEL for error in refused)
        assert all(f"quantised ({method})" in error.message for error in refused)
