"""A cluster in memory and a clock, for tests of plans: it carries plans out, and tests say what pods and Jobs do."""

import hashlib
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from osprey_api.conditions import EXIT_CODE_OF, FailureReason
from osprey_api.naming import (
    ANNOTATION_RETRY,
    API_VERSION,
    LABEL_FINGERPRINT,
    LABEL_KIND,
    LABEL_NAME,
    LABEL_STAGE,
)
from osprey_api.stages import (
    AdoptResult,
    ArtifactRef,
    BaselineResult,
    CaptureResult,
    ConvertResult,
    DistilResult,
    DomainAcceptance,
    EvaluateResult,
    ModelFacts,
    Outcome,
    Pinned,
    PinnedData,
    PretrainResult,
    PruneResult,
    RegenerateResult,
    ResolveConfig,
    ResolveResult,
    StageName,
    StageTask,
    TokenizeResult,
)
from osprey_operator.plan import plan
from osprey_operator.state import Observed, Plan, Refusal, Settings

START = datetime(2026, 1, 1, tzinfo=UTC)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
STORAGE = {"uri": "s3://drafters/test", "credentialsSecret": "s3"}
SETTINGS = Settings(trainer_image="trainer", serving_image="serving")
LABELS = (LABEL_KIND, LABEL_NAME, LABEL_STAGE, LABEL_FINGERPRINT)

BACKBONE_SPEC: dict[str, Any] = {
    "source": {"uri": "hf://org/model"},
    "layers": 2,
    "pretraining": {"data": [{"uri": "s3://texts/text.jsonl"}], "steps": 300},
    "storage": STORAGE,
}
DRAFTER_SPEC: dict[str, Any] = {
    "target": {"uri": "hf://org/model"},
    "backbone": "body",
    "data": [
        {"name": "math", "uri": "s3://prompts/math.jsonl"},
        {"name": "code", "uri": "s3://prompts/code.jsonl", "use": "Train"},
        {"name": "chat", "uri": "s3://prompts/chat.jsonl", "use": "Evaluate"},
    ],
    "serving": {"replicas": 2},
    "storage": STORAGE,
}


def digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def evaluation(length: float = 2.0, speedup: float = 1.5, identical: float = 1.0) -> EvaluateResult:
    def domain(name: str) -> DomainAcceptance:
        return DomainAcceptance(
            name=name,
            requests=4,
            acceptance_length=length,
            acceptance_length_corpus=length - 0.1,
            tokens_per_second=10 * speedup,
            baseline_tokens_per_second=10,
        )

    return EvaluateResult(
        requests=8,
        acceptance_length=length,
        acceptance_length_corpus=length - 0.1,
        acceptance_by_position=(0.6, 0.4),
        by_domain=(domain("math"), domain("chat")),
        tokens_per_second=10 * speedup,
        baseline_tokens_per_second=10,
        identical_outputs=identical,
    )


def result_of(task: StageTask) -> Any:
    """A plausible result."""
    match task.config:
        case ResolveConfig() as config:
            return ResolveResult(
                model=Pinned(uri=config.model.uri, revision=COMMIT),
                facts=ModelFacts(
                    architecture="LlamaForCausalLM", layers=30, hidden_size=576, vocab_size=49152, size_bytes=1
                ),
                data=tuple(
                    PinnedData(name=data.name, source=Pinned(uri=data.uri, digest=digest(data.uri)), rows=10)
                    for data in config.data
                ),
            )
        case _:
            return {
                StageName.PRUNE: PruneResult(parameters=7),
                StageName.TOKENIZE: TokenizeResult(rows=10, tokens=100),
                StageName.PRETRAIN: PretrainResult(steps=300, tokens=9, first_loss=5, final_loss=3),
                StageName.REGENERATE: RegenerateResult(
                    prompts=10, answer_tokens=100, cut_at_limit=0, skipped=0, tokens_per_second=9
                ),
                StageName.CAPTURE: CaptureResult(dialogues=10, tokens=200, size_bytes=9),
                StageName.ADOPT: AdoptResult(parameters=7, layers=2, draft_vocab_size=9),
                StageName.CONVERT: ConvertResult(
                    parameters=7, rows_copied=1, rows_composed=1, rows_left=0, coverage=0.9
                ),
                StageName.DISTIL: DistilResult(
                    steps=9, supervised_tokens=9, first_loss=5, final_loss=3, simulated_acceptance_length=2
                ),
                StageName.BASELINE: BaselineResult(requests=8, tokens_per_second=10),
                StageName.EVALUATE: evaluation(),
            }[task.stage]


def outcome_of(task: StageTask, result: Any = None) -> Outcome:
    artifact = None
    if task.stage is not StageName.RESOLVE:
        artifact = ArtifactRef(uri=task.prefix, digest=digest(task.prefix))
    return Outcome(artifact=artifact, result=result or result_of(task), seconds=12, peak_memory_bytes=1000)


def task_of(job: dict[str, Any]) -> StageTask:
    pod = job["spec"]["template"]["spec"]
    stage = next(entry for entry in pod["containers"] if entry["name"] == "stage")
    task = next(entry["value"] for entry in stage["env"] if entry["name"] == "OSPREY_TASK")
    return StageTask.model_validate_json(task)


@dataclass
class World:
    """One resource, everything around it, and the time."""

    kind: str
    spec: dict[str, Any]
    name: str = "small"
    settings: Settings = SETTINGS
    now: datetime = START
    jobs: list[dict[str, Any]] = field(default_factory=list)
    pods: list[dict[str, Any]] = field(default_factory=list)
    children: list[dict[str, Any]] = field(default_factory=list)
    observed: Observed = field(default_factory=Observed)
    plan: Plan = field(default_factory=Plan)
    writes: int = 0

    def __post_init__(self) -> None:
        self.ids = count(1)
        self.resource: dict[str, Any] = {
            "apiVersion": API_VERSION,
            "kind": self.kind,
            "metadata": {"name": self.name, "namespace": "ns", "uid": f"{self.kind}-{self.name}", "generation": 1},
            "spec": self.spec,
        }

    # --- the operator

    def look(self) -> Plan:
        """Make one pass."""
        seen = replace(self.observed, jobs=tuple(self.jobs), pods=tuple(self.pods), children=tuple(self.children))
        self.plan = plan(self.resource, seen, self.now, self.settings)
        for gone in self.plan.delete:
            self.remove(gone)
        for made in self.plan.create:
            self._add(made)
        for wanted in self.plan.apply:
            self._apply(wanted)
        if self.plan.status != self.resource.get("status"):
            self.writes += 1
        self.resource["status"] = self.plan.status
        return self.plan

    def settle(self, passes: int = 8) -> None:
        """Make passes until one changes nothing."""
        for _ in range(passes):
            before = self.writes
            self.look()
            if self.writes == before and not (self.plan.create or self.plan.delete or self.plan.apply):
                return
        raise AssertionError(f"it does not come to rest: {self.plan}")

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        self.settle()

    def edit(self, **changes: Any) -> None:
        self.resource["spec"] = {**self.resource["spec"], **changes}
        self.resource["metadata"]["generation"] += 1

    def retry(self, value: str) -> None:
        self.resource["metadata"].setdefault("annotations", {})[ANNOTATION_RETRY] = value

    # --- the cluster

    def remove(self, gone: dict[str, Any]) -> None:
        uid = gone["metadata"]["uid"]
        kept = [each for each in self.jobs if each["metadata"]["uid"] != uid]
        if len(kept) < len(self.jobs):
            self.pods = [
                pod
                for pod in self.pods
                if all(owner["uid"] != uid for owner in pod["metadata"].get("ownerReferences", []))
            ]
        self.jobs = kept
        self.children = [each for each in self.children if each["metadata"]["uid"] != uid]

    def _add(self, made: dict[str, Any]) -> None:
        target = self.jobs if made["kind"] == "Job" else self.children
        assert all(each["metadata"]["name"] != made["metadata"]["name"] for each in target), "made twice"
        target.append({**made, "metadata": {**made["metadata"], "uid": f"uid-{next(self.ids)}"}})

    def _apply(self, wanted: dict[str, Any]) -> None:
        before = [each for each in self.children if _same(each, wanted)]
        generation = before[0]["metadata"]["generation"] + 1 if before else 1
        self.children = [each for each in self.children if not _same(each, wanted)]
        metadata = {**wanted["metadata"], "uid": f"uid-{next(self.ids)}", "generation": generation}
        made = {**wanted, "metadata": metadata}
        if before and "status" in before[0]:
            made["status"] = before[0]["status"]
        self.children.append(made)

    # --- what the tests look at

    def job(self, stage: str) -> dict[str, Any]:
        found = [job for job in self.jobs if job["metadata"]["labels"][LABEL_STAGE] == stage]
        assert len(found) == 1, f"{len(found)} Jobs of {stage}"
        return found[0]

    def stages_with_jobs(self) -> set[str]:
        return {
            job["metadata"]["labels"][LABEL_STAGE] for job in self.jobs if not job.get("status", {}).get("conditions")
        }

    def stage(self, name: str) -> dict[str, Any]:
        return next(entry for entry in self.resource["status"]["stages"] if entry["name"] == name)

    def condition(self, kind: str) -> dict[str, Any]:
        return next(entry for entry in self.resource["status"]["conditions"] if entry["type"] == kind)

    def is_true(self, kind: str) -> bool:
        return self.condition(kind)["status"] == "True"

    def child(self, kind: str) -> dict[str, Any]:
        return next(child for child in self.children if child["kind"] == kind)

    # --- what the tests let happen

    def pod(self, stage: str, **status: Any) -> dict[str, Any]:
        """Give a stage's Job its pod, or another status to the one it has."""
        job = self.job(stage)
        uid = job["metadata"]["uid"]
        self.pods = [
            pod for pod in self.pods if all(owner["uid"] != uid for owner in pod["metadata"].get("ownerReferences", []))
        ]
        pod = {
            "kind": "Pod",
            "metadata": {
                "name": f"{job['metadata']['name']}-x",
                "uid": f"pod-{uid}",
                "labels": {key: job["metadata"]["labels"][key] for key in LABELS},
                "ownerReferences": [{"kind": "Job", "uid": uid}],
            },
            "status": status,
        }
        self.pods.append(pod)
        return pod

    def start(self, stage: str) -> None:
        self.pod(stage, phase="Running")
        self.settle()

    def end(self, stage: str, *, code: int = 0, message: str = "", reason: str = "", seconds: float = 60) -> None:
        """Let a stage's container end, and its Job."""
        terminated = {
            "exitCode": code,
            "message": message,
            "reason": reason or "Completed",
            "finishedAt": _stamp(self.now),
        }
        self.pod(
            stage,
            phase="Failed" if code else "Succeeded",
            containerStatuses=[{"name": "stage", "state": {"terminated": terminated}}],
        )
        kind = "Failed" if code else "Complete"
        self.job(stage)["status"] = {
            "startTime": _stamp(self.now - timedelta(seconds=seconds)),
            "conditions": [{"type": kind, "status": "True", "lastTransitionTime": _stamp(self.now)}],
        }
        self.settle()

    def succeed(self, stage: str, result: Any = None) -> None:
        task = task_of(self.job(stage))
        self.end(stage, message=outcome_of(task, result).model_dump_json())

    def fail(self, stage: str, reason: FailureReason, message: str = "so it is", seconds: float = 60) -> None:
        outcome = Outcome(failure=reason, message=message)
        self.end(stage, code=int(EXIT_CODE_OF[reason]), message=outcome.model_dump_json(), seconds=seconds)

    def roll(self) -> None:
        """Let the Deployment's controller finish."""
        deployment = self.child("Deployment")
        replicas = deployment["spec"]["replicas"]
        deployment["status"] = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": replicas,
            "updatedReplicas": replicas,
            "readyReplicas": replicas,
            "availableReplicas": replicas,
        }
        self.settle()

    def refuse(self, child: str, content: str, reason: FailureReason, seconds: float) -> None:
        refusal = Refusal(reason, "no", content, self.now + timedelta(seconds=seconds))
        self.observed = replace(self.observed, refusals={child: refusal})


def backbone(**changes: Any) -> World:
    return World("OspreyBackbone", {**BACKBONE_SPEC, **changes})


def drafter(**changes: Any) -> World:
    world = World("OspreyDrafter", {**DRAFTER_SPEC, **changes})
    world.observed = Observed(backbone=finished_backbone())
    return world


def finished_backbone(name: str = "body", *, ready: str = "True", reason: str = "Complete") -> dict[str, Any]:
    return {
        "kind": "OspreyBackbone",
        "metadata": {"name": name, "namespace": "ns", "uid": "body", "generation": 3},
        "spec": BACKBONE_SPEC,
        "status": {
            "observedGeneration": 3,
            "artifact": {"uri": "s3://drafters/test/ns/pretrain/f", "digest": digest("body")},
            "conditions": [
                {"type": "Ready", "status": ready, "reason": reason, "lastTransitionTime": "2026-01-01T00:00:00Z"}
            ],
        },
    }


def ready_drafter(**changes: Any) -> World:
    """A drafter that is trained and served."""
    world = drafter(**changes)
    world.settle()
    for stage in ("resolve", "regenerate", "baseline", "convert", "distil", "evaluate"):
        world.succeed(stage)
    if "serving" in world.spec:
        world.roll()
    return world


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["kind"] == other["kind"] and one["metadata"]["name"] == other["metadata"]["name"]


def _stamp(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
