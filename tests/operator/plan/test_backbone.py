from osprey_api.stages import InputRole
from osprey_operator.state import StageProgress
from tests.operator.world import STORAGE, backbone, digest, task_of


def test_a_backbone_goes_through_its_stages_to_ready():
    world = backbone()
    world.settle()
    assert world.stages_with_jobs() == {"resolve"}
    assert not world.is_true("Ready")
    assert world.condition("Resolved")["reason"] == "Resolving"

    world.succeed("resolve")
    assert world.is_true("Resolved")
    assert world.stages_with_jobs() == {"prune", "tokenize"}

    world.succeed("tokenize")
    assert world.stages_with_jobs() == {"prune"}
    world.succeed("prune")
    assert world.stages_with_jobs() == {"pretrain"}
    task = task_of(world.job("pretrain"))
    assert set(task.inputs) == {InputRole.BACKBONE, InputRole.TOKENS}
    assert task.inputs[InputRole.TOKENS].digest == digest(task_of(world.job("tokenize")).prefix)
    assert task.inputs[InputRole.BACKBONE].digest == digest(task_of(world.job("prune")).prefix)
    assert not world.is_true("Ready")

    world.succeed("pretrain")
    assert world.is_true("Ready")
    assert world.resource["status"]["artifact"] == {"uri": task.prefix, "digest": digest(task.prefix)}
    assert world.condition("Progressing") == {
        "type": "Progressing",
        "status": "False",
        "reason": "Complete",
        "message": "complete",
        "lastTransitionTime": world.condition("Progressing")["lastTransitionTime"],
        "observedGeneration": 1,
    }
    assert world.stage("pretrain")["metrics"]["final_loss"] == 3
    assert world.stage("pretrain")["metrics"]["peak_memory_bytes"] == 1000


def test_a_finished_resource_is_written_no_more_and_asks_for_no_pass():
    world = backbone()
    world.settle()
    for stage in ("resolve", "prune", "tokenize", "pretrain"):
        world.succeed(stage)
    writes, since = world.writes, world.condition("Ready")["lastTransitionTime"]
    world.wait(3600)
    assert world.writes == writes
    assert world.condition("Ready")["lastTransitionTime"] == since
    assert world.plan.requeue_after is None


def test_finished_jobs_may_go():
    world = backbone()
    world.settle()
    for stage in ("resolve", "prune", "tokenize", "pretrain"):
        world.succeed(stage)
    world.jobs, world.pods = [], []
    world.wait(60)
    assert world.jobs == []
    assert world.is_true("Ready")


def test_without_pretraining_the_pruned_model_is_the_backbone():
    world = backbone()
    del world.resource["spec"]["pretraining"]
    world.settle()
    world.succeed("resolve")
    world.succeed("prune")
    assert world.is_true("Ready")
    assert [entry["name"] for entry in world.resource["status"]["stages"]] == ["resolve", "prune"]


def test_an_imported_backbone_is_ready_at_once():
    world = backbone()
    world.resource["spec"] = {"import": {"uri": "s3://shared/backbone/", "digest": digest("x")}}
    world.settle()
    assert world.is_true("Ready")
    assert world.condition("Ready")["reason"] == "Imported"
    assert world.resource["status"]["artifact"] == {"uri": "s3://shared/backbone", "digest": digest("x")}
    assert world.jobs == []


def test_what_a_backbone_made_before_it_was_imported_goes():
    world = backbone(job={"nodes": 2})
    world.settle()
    for stage in ("resolve", "prune", "tokenize"):
        world.succeed(stage)
    assert [child["kind"] for child in world.children] == ["Service"]
    world.resource["spec"] = {"import": {"uri": "s3://shared/backbone", "digest": digest("x")}}
    world.edit()
    world.settle()
    assert world.jobs == []
    assert world.children == []


def test_a_new_learning_rate_repeats_pretraining_alone():
    world = backbone()
    world.settle()
    for stage in ("resolve", "prune", "tokenize", "pretrain"):
        world.succeed(stage)
    before = {name: world.stage(name)["fingerprint"] for name in ("resolve", "prune", "tokenize", "pretrain")}
    world.edit(pretraining={**world.spec["pretraining"], "learningRate": 0.5})
    world.settle()
    assert world.stages_with_jobs() == {"pretrain"}
    assert not world.is_true("Ready")
    after = {name: world.stage(name)["fingerprint"] for name in before}
    assert {name for name in before if before[name] != after[name]} == {"pretrain"}
    world.succeed("pretrain")
    assert world.is_true("Ready")
    assert world.condition("Ready")["observedGeneration"] == 2


def test_an_edit_half_way_deletes_the_job_that_is_wanted_no_more():
    world = backbone()
    world.settle()
    for stage in ("resolve", "prune", "tokenize"):
        world.succeed(stage)
    old = world.job("pretrain")["metadata"]["uid"]
    world.start("pretrain")
    world.edit(pretraining={**world.spec["pretraining"], "steps": 301})
    world.settle()
    assert world.job("pretrain")["metadata"]["uid"] != old


def test_progress_is_one_line():
    world = backbone()
    world.settle()
    for stage in ("resolve", "prune", "tokenize"):
        world.succeed(stage)
    world.pod("pretrain", phase="Running")
    uid = world.job("pretrain")["metadata"]["uid"]
    said = StageProgress(step=120, total_steps=300, eta_seconds=181.7, loss=3.14159265)
    world.observed = type(world.observed)(progress={uid: said})
    world.settle()
    assert world.condition("Progressing")["message"] == "pretrain 120/300, 3 min left"
    assert world.condition("Progressing")["status"] == "True"
    entry = world.stage("pretrain")
    assert (entry["state"], entry["step"], entry["totalSteps"], entry["etaSeconds"], entry["loss"]) == (
        "Running", 120, 300, 182, 3.1416,
    )  # fmt: skip
    assert world.plan.requeue_after == world.settings.poll_seconds


def test_no_storage_at_all_is_said():
    world = backbone()
    del world.resource["spec"]["storage"]
    world.settle()
    assert world.condition("Ready")["reason"] == "InvalidConfig"
    assert "spec.storage" in world.condition("Ready")["message"]
    world.edit(storage=STORAGE)
    world.settle()
    assert world.stages_with_jobs() == {"resolve"}


def test_another_storage_makes_everything_there():
    world = backbone()
    world.settle()
    for stage in ("resolve", "prune", "tokenize", "pretrain"):
        world.succeed(stage)
    world.edit(storage={"uri": "s3://elsewhere/x"})
    world.jobs, world.pods = [], []
    world.settle()
    assert world.stages_with_jobs() == {"prune", "tokenize"}


def test_a_spec_of_another_version_is_said():
    world = backbone()
    world.resource["spec"] = {**world.spec, "novelty": 1}
    world.settle()
    assert world.condition("Ready")["reason"] == "InvalidConfig"
    assert "novelty" in world.condition("Ready")["message"]


def test_a_status_that_cannot_be_read_loses_nothing():
    world = backbone()
    world.resource["status"] = {"stages": "what?"}
    world.settle()
    assert world.stages_with_jobs() == {"resolve"}
