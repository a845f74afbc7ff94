"""Fingerprints address artifacts for years: their bytes must never move by accident."""

import math

import pytest

from osprey_api.fingerprint import canonical_json, fingerprint
from osprey_api.stages import (
    ArtifactRef,
    Execution,
    InputRole,
    Optimization,
    Pinned,
    PretrainConfig,
    PruneConfig,
    StageTask,
    StorageLocation,
    stage_fingerprint,
)

CONFIG = PruneConfig(source=Pinned(uri="hf://Qwen/Qwen3-4B", revision="a" * 40), layers=2)


def test_canonical_json_has_one_spelling():
    assert canonical_json({"b": [1, 2.5], "a": "ä"}) == '{"a":"ä","b":[1,2.5]}'.encode()
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_json_cannot_say_is_refused(number):
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": number})


def test_a_known_config_keeps_its_fingerprint():
    # If this fails, every artifact of every user would be computed again: raise the stage's CODE_VERSION instead.
    assert stage_fingerprint(CONFIG, {}) == "b79f8d8ed14272649bb7e50a12a08b87a39b73a197b2b323417f8c74b6de230f"


def test_what_was_trained_before_there_was_a_choice_of_optimizer_keeps_its_fingerprint():
    optimization = Optimization(
        learning_rate=1e-4, schedule="Cosine", warmup_ratio=0.04, weight_decay=0.0, clip_norm=1.0, ema_decay=None,
        global_batch_size=2, sequence_length=4096, precision="BF16", seed=0,
    )  # fmt: skip
    config = PretrainConfig(steps=1, loss_vocab_size=None, freeze_embedding=False, optimization=optimization)
    assert "muonScale" not in config.model_dump(by_alias=True)["optimization"]
    muon = config.model_copy(update={"optimization": optimization.model_copy(update={"muon_scale": 3.0})})
    assert "muonScale" in muon.model_dump_json()
    assert stage_fingerprint(muon, {}) != stage_fingerprint(config, {})
    assert StageTask.model_validate_json(task_of(muon).model_dump_json()).config == muon
    assert StageTask.model_validate_json(task_of(config).model_dump_json()).config == config


def test_config_inputs_stage_and_code_version_all_count():
    base = {"stage": "prune", "code_version": 1, "config": {"layers": 2}, "inputs": {"backbone": "sha256:" + "0" * 64}}
    variants = [
        base,
        base | {"stage": "convert"},
        base | {"code_version": 2},
        base | {"config": {"layers": 3}},
        base | {"inputs": {"backbone": "sha256:" + "1" * 64}},
        base | {"inputs": {}},
    ]
    assert len({fingerprint(**variant) for variant in variants}) == len(variants)


def test_where_the_inputs_lie_and_how_the_work_is_spread_do_not_count():
    here, there = (ArtifactRef(uri=f"s3://{bucket}/x", digest="sha256:" + "0" * 64) for bucket in ("here", "there"))
    assert stage_fingerprint(CONFIG, {InputRole.BACKBONE: here}) == stage_fingerprint(
        CONFIG, {InputRole.BACKBONE: there}
    )
    assert "zero" not in CONFIG.model_dump_json()


def task_of(config):
    return StageTask(
        fingerprint=stage_fingerprint(config, {}),
        namespace="ml",
        resource="ospreybackbone/qwen3",
        storage=StorageLocation(uri="s3://drafters/prod/"),
        config=config,
        execution=Execution(nodes=2),
    )


def test_a_task_survives_the_trip_through_json():
    task = task_of(CONFIG)
    again = StageTask.model_validate_json(task.model_dump_json())
    assert again == task
    assert again.prefix == f"s3://drafters/prod/ml/prune/{task.fingerprint}"
