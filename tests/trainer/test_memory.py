"""What is said of memory before training is what training then needs, at least."""

import dataclasses
import json
import shutil

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError
from osprey_trainer import memory
from osprey_trainer.memory import Need, check, drafter_bytes, target_bytes, unroll_bytes
from osprey_trainer.models.target import Target, TargetStates
from osprey_trainer.unroll import unroll

GIB = 1 << 30


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("arrangement", ["osprey", "eagle3"])
def test_what_the_unroll_keeps_is_counted_without_data(trained, dialogues, arrangement, bf16):
    drafter = trained(arrangement)
    batch = dialogues((9, 30), (14, 10))
    rows = [*range(9, 38), *range(53, 62)]
    kept, weights = {}, {x.untyped_storage().data_ptr() for x in (*drafter.parameters(), *drafter.buffers())}
    alive = []

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    if bf16:
        taps = TargetStates(batch.states.taps.bfloat16(), batch.states.last_hidden)
        batch = dataclasses.replace(batch, states=taps)
    with saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        unroll(drafter, batch, rows, 4)
    truth = sum(size for storage, size in kept.items() if storage not in weights)
    told = unroll_bytes(drafter.config, tokens=[39, 24], rows=[29, 9], steps=4, bf16=bf16)
    assert told == pytest.approx(truth, rel=0.01)


def test_it_grows_with_length_steps_and_layers(trained):
    config = trained("osprey").config

    def of(**changes):
        shape = {"tokens": [500], "rows": [400], "steps": 4, "bf16": True, **changes}
        return unroll_bytes(shape.pop("config", config), **shape)

    assert of(tokens=[1000], rows=[800]) > 1.9 * of()
    assert of(steps=8) > 1.5 * of()
    deeper = dataclasses.replace(config, body=dataclasses.replace(config.body, num_layers=4))
    assert of(config=deeper) > 1.5 * of()


def test_zero_divides_what_it_says(trained):
    drafter = trained("osprey")
    weights = 4 * sum(parameter.numel() for parameter in drafter.parameters())

    def of(stage, *, trains_embedding=True, muon=False):
        return drafter_bytes(
            drafter.config, trains_embedding=trains_embedding, muon=muon, zero_stage=stage, world_size=4
        )

    assert [of(stage) for stage in range(4)] == pytest.approx(
        [4 * weights, 2.5 * weights, 1.75 * weights, weights], abs=16
    )
    frozen = 4 * drafter.embed_tokens.weight.numel()
    assert of(0, trains_embedding=False) == 4 * weights - 3 * frozen
    # Muon keeps one number for each of a matrix's, but embedding and head are AdamW's.
    matrices = [p for p in (*drafter.layers.parameters(), *drafter.fc.parameters()) if p.ndim == 2]
    assert of(0, muon=True) == 4 * weights - 4 * sum(p.numel() for p in matrices)


def test_the_targets_weights_are_counted_from_their_headers(target_folder, tmp_path):
    target = Target(target_folder)
    count = sum(parameter.numel() for parameter in target.body.parameters()) + target.head.weight.numel()
    assert target_bytes(target_folder, torch.bfloat16, processes=1) == 2 * count
    assert target_bytes(target_folder, torch.float32, processes=2) == 2 * count
    # The same weights once more in another layout; what is quantised is unpacked, or as large as its file.
    other = shutil.copytree(target_folder, tmp_path / "other")
    shutil.copy(other / "model.safetensors", other / "consolidated.safetensors")
    assert target_bytes(other, torch.bfloat16, processes=1) == 2 * count
    config = json.loads((other / "config.json").read_text())
    for method, size in {"fp8": 2 * count, "awq": (other / "model.safetensors").stat().st_size}.items():
        quantised = config | {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 8}}
        (other / "config.json").write_text(json.dumps(quantised))
        assert target_bytes(other, torch.bfloat16, processes=1) == size


def test_what_cannot_fit_is_refused_with_what_would():
    def need(tokens):
        return Need(target=16 * GIB, drafter=4 * GIB, unroll=tokens * (GIB // 100))

    check(need(5000), tokens=5000, available=80 * GIB)
    with pytest.raises(
        StageError, match=r"at least 101\.9 GiB of the 80\.0 .* 8192 tokens: .* to 6000 or less"
    ) as caught:
        check(need(8192), tokens=8192, available=80 * GIB)
    assert caught.value.reason is FailureReason.INVALID_CONFIG
    with pytest.raises(StageError, match=r"larger GPUs"):
        check(need(8192), tokens=8192, available=16 * GIB)


def test_this_machine_has_memory(monkeypatch, tmp_path):
    machine = memory.device_bytes(torch.device("cpu"))
    assert machine > GIB
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CGROUP_LIMIT", limit)
    for content, expected in (("max\n", None), (f"{3 * GIB}\n", 3 * GIB)):
        limit.write_text(content)
        found = memory.device_bytes(torch.device("cpu"))
        assert found == expected if expected else found >= machine
