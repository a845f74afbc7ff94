"""A drafter that is imported is judged and served like a trained one, and nothing is trained for it."""

import pytest

from osprey_api.conditions import FailureReason
from osprey_api.stages import ArtifactRef, InputRole
from tests.operator.world import DRAFTER_SPEC, STORAGE, digest, drafter, evaluation, ready_drafter, task_of

IMPORT = {"uri": "s3://released/qwen/osprey-math/", "digest": digest("released")}


def importing(**changes):
    world = drafter(**{"import": IMPORT, **changes})
    del world.spec["backbone"]
    return world


def adopted(**changes):
    world = importing(**changes)
    world.settle()
    for stage in ("resolve", "adopt", "baseline"):
        world.succeed(stage)
    return world


def test_an_imported_drafter_is_evaluated_and_served():
    world = importing()
    world.settle()
    assert world.stages_with_jobs() == {"resolve"}
    assert not task_of(world.job("resolve")).config.teaches  # the trainer never runs this target
    assert world.condition("Trained")["status"] == "False"
    world.succeed("resolve")
    assert world.stages_with_jobs() == {"adopt"}  # no GPU before it is known to fit
    task = task_of(world.job("adopt"))
    assert task.inputs == {InputRole.DRAFTER: ArtifactRef(uri=IMPORT["uri"].rstrip("/"), digest=IMPORT["digest"])}
    assert task.config.target.uri == world.spec["target"]["uri"]
    world.succeed("adopt")
    assert world.is_true("Trained")
    assert world.condition("Trained")["reason"] == "Imported"
    assert world.stages_with_jobs() == {"baseline"}
    world.succeed("baseline")
    assert world.stages_with_jobs() == {"evaluate"}
    taken = ArtifactRef.model_validate(world.stage("adopt")["artifact"])
    assert task_of(world.job("evaluate")).inputs[InputRole.DRAFTER] == taken
    assert taken.uri.startswith(f"{STORAGE['uri']}/ns/adopt/")  # in the resource's own storage from here on
    world.succeed("evaluate")
    world.roll()
    assert world.is_true("Ready")
    status = world.resource["status"]
    assert [stage["name"] for stage in status["stages"]] == ["resolve", "adopt", "baseline", "evaluate"]
    assert [revision["state"] for revision in status["revisions"]] == ["Serving"]
    assert status["artifact"] == world.stage("adopt")["artifact"]
    writes = world.writes
    world.wait(3600)
    assert world.writes == writes


def test_an_imported_drafter_has_to_pass_the_gate():
    world = adopted()
    world.succeed("evaluate", evaluation(speedup=0.7))
    assert world.is_true("Trained")
    assert world.condition("GatePassed")["reason"] == "TooSlow"
    assert world.resource["status"]["revisions"][0]["state"] == "Rejected"
    world.roll()
    assert world.condition("RolledOut")["reason"] == "ServingWithoutDrafter"


def test_the_same_drafter_elsewhere_is_the_same():
    world = adopted()
    before = world.stage("adopt")["fingerprint"]
    world.edit(**{"import": {**IMPORT, "uri": "s3://moved/osprey-math"}})
    world.settle()
    assert world.stage("adopt")["fingerprint"] == before
    assert world.stages_with_jobs() == {"evaluate"}
    world.edit(**{"import": {**IMPORT, "digest": digest("another")}})
    world.settle()
    assert world.stages_with_jobs() == {"adopt"}


@pytest.mark.parametrize("reason", ["InvalidConfig", "UnsupportedModel"])
def test_one_that_does_not_fit_is_told_and_not_tried_again(reason):
    world = importing()
    world.settle()
    world.succeed("resolve")
    world.fail("adopt", FailureReason(reason), "another target's")
    assert world.condition("Trained")["reason"] == world.condition("Ready")["reason"] == reason
    world.wait(24 * 3600)
    assert world.stages_with_jobs() == set()
    world.edit(**{"import": {**IMPORT, "digest": digest("another")}})
    world.settle()
    assert world.stages_with_jobs() == {"adopt"}


def test_a_trained_drafter_gives_way_to_an_imported_one_and_back():
    world = ready_drafter()
    world.resource["spec"].pop("backbone")
    world.edit(**{"import": IMPORT})
    world.settle()
    world.succeed("resolve")
    assert world.stages_with_jobs() == {"adopt"}  # the baseline and what is served stay
    world.succeed("adopt")
    world.succeed("evaluate", evaluation(length=2.5))
    world.roll()
    assert [revision["state"] for revision in world.resource["status"]["revisions"]] == ["Serving", "Superseded"]
    world.resource["spec"].pop("import")
    world.edit(backbone=DRAFTER_SPEC["backbone"])
    world.settle()
    world.succeed("resolve")
    assert world.stages_with_jobs() == {"regenerate"}


def test_prompts_that_only_evaluate_are_enough():
    world = importing(data=[{"name": "math", "uri": "s3://prompts/math.jsonl", "use": "Evaluate"}])
    world.settle()
    world.succeed("resolve")
    world.succeed("adopt")
    assert [prompt.name for prompt in task_of(world.job("baseline")).config.prompts] == ["math"]
