"""`OspreyDrafter`: a drafter for one served model, trained, evaluated, gated, served and watched."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from osprey_api.base import ApiModel, Name, StatusModel, SubdomainName
from osprey_api.common import (
    ImportedArtifact,
    MaxDropped,
    ModelSource,
    PodTemplate,
    ResourceSpec,
    SourceUri,
    Storage,
    TrainingOptimization,
    training_rules,
)
from osprey_api.rows import DEFAULT_MAX_DROPPED
from osprey_api.stages import ArtifactRef, Pinned, Speculation, StageName
from osprey_api.status import Asked, Condition, Resolved, StageStatus

KIND = "OspreyDrafter"
PLURAL = "ospreydrafters"
SHORT_NAMES = ("od",)

ServerArgument = Annotated[str, Field(min_length=1, max_length=512)]


class Target(ModelSource):
    """The served model."""

    tensor_parallel: int = Field(default=1, ge=1, le=64, description="GPUs over which one server splits the model.")
    gpus: Annotated[int, Field(ge=0, le=64)] | None = Field(
        default=None, description="GPUs that one server asks for; unset: tensorParallel; 0: it runs on CPU."
    )
    server_args: Annotated[tuple[ServerArgument, ...], Field(max_length=64)] = Field(
        default=(),
        description="Arguments of every SGLang server of this target, such as --dtype or --mem-fraction-static.",
    )


class DataUse(StrEnum):
    """What a domain's prompts are for."""

    TRAIN_AND_EVALUATE = "TrainAndEvaluate"
    TRAIN = "Train"
    EVALUATE = "Evaluate"


class PromptData(ApiModel):
    """Prompts of one domain. The target answers them; no answers are read from the data."""

    name: Name = Field(description="The domain's name, in status and metrics.")
    uri: SourceUri = Field(
        description="hf://OWNER/NAME?name=CONFIG&split=SPLIT or hf://OWNER/NAME?file=PATH, or a file or a folder "
        "of files: s3://BUCKET/KEY, pvc://CLAIM/PATH. JSON Lines, a JSON list, Parquet or plain text."
    )
    prompt_field: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        default=None,
        description="Field of a row that holds the user's message, or a list of messages; unset: prompt, messages, "
        "conversations or instruction (with input), whichever the row has.",
    )
    max_dropped: MaxDropped = DEFAULT_MAX_DROPPED
    samples: Annotated[int, Field(ge=1, le=100000000)] | None = Field(
        default=None, description="Prompts to train on, after the held-out ones were set aside; unset: all."
    )
    use: DataUse = Field(
        default=DataUse.TRAIN_AND_EVALUATE, description="Whether the prompts train, evaluate, or both."
    )


class Regeneration(ApiModel):
    """The target answers the training prompts, so that the drafter learns the target's own words."""

    max_tokens: int = Field(default=4096, ge=1, le=1048576, description="Longest answer, in tokens.")
    temperature: float = Field(default=0.0, ge=0, le=2, description="0 is greedy.")
    concurrency: int = Field(default=64, ge=1, le=4096, description="Requests in flight.")
    seed: int = Field(default=0, ge=0, le=2147483647, description="Seed of sampling and of the held-out choice.")


class Teacher(ApiModel):
    """How the target's hidden states reach the drafter."""

    mode: Literal["Online", "Captured"] = Field(
        default="Online",
        description="Online: computed for every batch. Captured: computed once, by a stage of their own, and read from "
        "the storage by every drafter of these answers.",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that share the target's layers, where it is too large for one GPU.",
    )
    max_storage_gib: int = Field(
        default=1024,
        ge=1,
        le=1048576,
        alias="maxStorageGiB",
        description="Captured: most GiB that the states may take, which is known and said before the target is loaded.",
    )


class Distillation(TrainingOptimization):
    """Stage 4: the training-time-test unroll against the frozen target."""

    epochs: int = Field(default=3, ge=1, le=1000, description="Passes over the answers.")
    sequence_length: int = Field(default=4096, ge=16, le=1048576, description="Longest prompt and answer, in tokens.")
    global_batch_size: int = Field(
        default=2,
        ge=1,
        le=65536,
        description="Conversations per optimizer step, over all processes, whose number must divide it.",
    )
    learning_rate: float = Field(default=1e-4, gt=0, le=1, description="Peak learning rate.")
    warmup_ratio: float = Field(default=0.04, ge=0, lt=1, description="Share of the steps that warm up.")
    unroll: int = Field(default=5, ge=1, le=16, description="Steps of the training-time-test unroll.")
    decay: float = Field(
        default=0.8, gt=0, le=1, description="The loss of step k weighs decay ** k; not used with stepWeights."
    )
    step_weights: (
        Annotated[tuple[Annotated[float, Field(ge=0, le=1000)], ...], Field(min_length=1, max_length=16)] | None
    ) = Field(default=None, description="Weight of each of the `unroll` steps, in place of powers of decay.")
    loss: Literal["CrossEntropy", "LKAlpha", "LKLambda"] = Field(
        default="CrossEntropy",
        description="Against the target's distribution: cross-entropy, or one of the LK losses, which aim at the "
        "acceptance of sampled drafts: LKAlpha is -log acceptance; LKLambda goes from cross-entropy to 1 - acceptance "
        "as the acceptance grows.",
    )
    lk_decay: float = Field(
        default=3.0, ge=0, le=100, description="Of LKLambda: the cross-entropy weighs exp(-lkDecay * acceptance)."
    )
    hard_label_weight: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the cross-entropy against the target's most likely token alone; the rest is `loss`.",
    )
    draft_vocab_size: Annotated[int, Field(ge=16, le=1048576)] | None = Field(
        default=32000,
        description="The most frequent tokens of the answers that the drafter can propose; "
        "larger than the target's vocabulary means all.",
    )
    freeze_embedding: bool = Field(
        default=False,
        description="Keep the embedding as converted; an EAGLE-3 drafter always does: SGLang gives it the target's.",
    )
    teacher: Teacher = Field(default_factory=Teacher, description="How the target's states are had.")


class Gate(ApiModel):
    """What a drafter must reach before it is served."""

    min_speedup: float = Field(
        default=1.0,
        ge=0,
        le=100,
        description="Least tokens per second relative to the target without a drafter; 0 asks for nothing.",
    )
    max_regression: float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="Most that acceptance length may fall below the serving revision's, as a share; 1 asks for "
        "nothing. Not asked where that one was measured with other prompts, limits, speculation or another server.",
    )
    min_acceptance_length: float = Field(
        default=1.0, ge=1, le=129, description="Least mean acceptance length over all domains; 1 asks for nothing."
    )
    min_identical_outputs: float = Field(
        default=0.9,
        ge=0,
        le=1,
        description="Least share of greedy outputs equal to those without a drafter; 1 is right in FP32 on CPU, "
        "0 asks for nothing.",
    )


class Evaluation(ApiModel):
    """The held-out prompts, with the drafter and without, by a real server."""

    samples: int = Field(default=128, ge=1, le=100000, description="Held-out prompts per domain.")
    max_tokens: int = Field(default=1024, ge=1, le=1048576, description="Longest answer, in tokens.")
    concurrency: int = Field(default=1, ge=1, le=4096, description="Requests in flight.")
    gate: Gate = Field(default_factory=Gate, description="What must be reached before it is served.")


class RolloutStrategy(StrEnum):
    """How a new drafter replaces the old one."""

    ROLLING_UPDATE = "RollingUpdate"
    RECREATE = "Recreate"


class Rollout(ApiModel):
    """How a new drafter replaces the old one."""

    strategy: RolloutStrategy = Field(
        default=RolloutStrategy.ROLLING_UPDATE,
        description="RollingUpdate: server by server. Recreate: all at once, with a gap.",
    )
    max_surge: int = Field(
        default=0, ge=0, le=64, description="Servers above replicas during a roll; needs as many spare GPUs."
    )


class Serving(ApiModel):
    """The SGLang servers of the target."""

    replicas: Annotated[int, Field(ge=0, le=1024)] | None = Field(
        default=None,
        description="Servers; unset: left to an autoscaler. Let it take over before you unset this: otherwise "
        "one server is left.",
    )
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None, description="SGLang image; unset: the operator's default."
    )
    speculation: Speculation = Field(default_factory=Speculation, description="Drafting per verification.")
    rollout: Rollout = Field(default_factory=Rollout, description="How a new drafter replaces the old one.")
    template: PodTemplate | None = Field(
        default=None,
        description="Strategic merge into the servers' pod template; the container is named server.",
    )


class Adaptation(ApiModel):
    """When live traffic is no longer what the drafter was trained for."""

    max_acceptance_drop: float = Field(
        default=0.15,
        gt=0,
        lt=1,
        description="Fall of the live acceptance length below the evaluated one, as a share.",
    )
    window_seconds: int = Field(
        default=1800, ge=10, le=604800, description="Traffic over which live acceptance length is measured."
    )
    min_verify_steps: int = Field(
        default=1000, ge=1, le=1000000000, description="A window with fewer verify steps says nothing."
    )


class OspreyDrafterSpec(ResourceSpec):
    """What the user wants."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "!has(self.__import__) || !has(self.backbone)",
                    "message": "an imported drafter is finished: remove backbone, or remove import to train one",
                },
                {
                    "rule": "has(self.__import__) || self.data.exists(d, d.use != 'Evaluate')",
                    "message": "no data source trains: set use of at least one to Train or TrainAndEvaluate",
                },
                {
                    "rule": "self.data.exists(d, d.use != 'Train')",
                    "message": "no data source evaluates: set use of at least one to Evaluate or TrainAndEvaluate",
                },
                {
                    "rule": "!has(self.serving) || !has(self.serving.speculation) || "
                    "self.serving.speculation.topK != 1 || "
                    "self.serving.speculation.draftTokens == self.serving.speculation.steps + 1",
                    "message": "with topK 1 the draft is a chain: set draftTokens to steps + 1",
                },
                {
                    "rule": "self.target.uri == oldSelf.target.uri",
                    "message": "target.uri cannot change: create another OspreyDrafter for another model",
                },
                {
                    "rule": "has(self.__import__) || has(oldSelf.__import__) || "
                    "has(self.backbone) == has(oldSelf.backbone)",
                    "message": "a drafter cannot change between Osprey and EAGLE-3: "
                    "create another OspreyDrafter with, or without, a backbone",
                },
                {
                    "rule": "!has(self.distillation.stepWeights) || "
                    "self.distillation.stepWeights.size() == self.distillation.unroll",
                    "message": "distillation.stepWeights has not one weight for each step of the unroll: give as many, "
                    "or set unroll to their number",
                },
                {
                    "rule": "!has(self.distillation.stepWeights) || self.distillation.stepWeights[0] > 0.0",
                    "message": "the first of distillation.stepWeights is 0, and nothing would teach the first draft: "
                    "make it positive",
                },
                {
                    "rule": "self.job.nodes * (self.job.gpusPerNode > 0 ? self.job.gpusPerNode : 1) % "
                    "self.distillation.teacher.tensorParallel == 0",
                    "message": "every process takes part in one teacher: make job.nodes times job.gpusPerNode a "
                    "multiple of distillation.teacher.tensorParallel",
                },
                *training_rules("distillation"),
            ]
        }
    )

    target: Target = Field(description="The served model.")
    backbone: SubdomainName | None = Field(
        default=None,
        description="OspreyBackbone of this namespace, in a storage with the same endpoint, that the keys of this one "
        "can read; unset: an EAGLE-3 drafter from scratch, the baseline, unless one is imported.",
    )
    import_: ImportedArtifact | None = Field(
        default=None,
        alias="import",
        description="A finished drafter of this target, in place of training one: regeneration and distillation are "
        "left out, and it is evaluated, judged and served like a trained one.",
    )
    data: Annotated[tuple[PromptData, ...], Field(min_length=1, max_length=8)] = Field(
        description="Prompts, a source per domain.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    regeneration: Regeneration = Field(default_factory=Regeneration, description="The target's answers.")
    distillation: Distillation = Field(default_factory=Distillation, description="Stage 4.")
    evaluation: Evaluation = Field(default_factory=Evaluation, description="Measured by a real server.")
    serving: Serving | None = Field(
        default=None, description="Unset: the drafter is trained, evaluated and exported, and not served."
    )
    adaptation: Adaptation | None = Field(default=None, description="Unset: live acceptance is not judged.")
    revision_history_limit: int = Field(default=5, ge=1, le=20, description="Drafter revisions kept in status.")


class RevisionState(StrEnum):
    """What became of a drafter."""

    SERVING = "Serving"
    ROLLING_OUT = "RollingOut"
    REJECTED = "Rejected"
    SUPERSEDED = "Superseded"
    EXPORTED = "Exported"


class Revision(StatusModel):
    """One finished drafter of this resource."""

    artifact: ArtifactRef = Field(description="The drafter, in the serving format.")
    evaluation: str = Field(max_length=64, description="Fingerprint of its evaluation.")
    measured: str = Field(
        default="", max_length=64, description="Of the evaluation's prompts, limits, speculation and server."
    )
    target: Pinned | None = Field(
        default=None, description="The target that it was trained for and measured with: served as long as it is."
    )
    storage: Storage | None = Field(default=None, description="Where the artifact lies.")
    acceptance_length: float = Field(description="Evaluated acceptance length, the mean over requests.")
    acceptance_length_corpus: float = Field(
        description="Evaluated acceptance length, all tokens over all verify steps: what live traffic is compared with."
    )
    state: RevisionState = Field(description="What became of it.")


class DomainAcceptanceStatus(StatusModel):
    """Acceptance length of one domain."""

    name: str = Field(max_length=63, description="The domain.")
    evaluated: float = Field(description="Mean over requests, by the last evaluation.")
    evaluated_corpus: float = Field(description="All tokens over all verify steps, by the last evaluation.")
    speedup: float = Field(description="Tokens per second relative to no drafter.")


class AcceptanceStatus(StatusModel):
    """Acceptance length."""

    evaluated: float | None = Field(default=None, description="Mean over requests, by the last evaluation.")
    evaluated_corpus: float | None = Field(
        default=None, description="All tokens over all verify steps, by the last evaluation."
    )
    live: float | None = Field(
        default=None,
        description="Tokens over verify steps of the servers' recent traffic; unset: too little.",
    )
    by_domain: Annotated[tuple[DomainAcceptanceStatus, ...], Field(max_length=8)] = Field(
        default=(), description="By the last evaluation."
    )


class ThroughputStatus(StatusModel):
    """Tokens per second."""

    baseline: float | None = Field(default=None, description="Without a drafter, on the held-out prompts.")
    evaluated: float | None = Field(default=None, description="With the drafter, on the same prompts.")
    live: float | None = Field(default=None, description="Of all servers together, now.")


class OspreyDrafterStatus(StatusModel):
    """What is."""

    observed_generation: int | None = Field(default=None, description="Generation that this status is about.")
    conditions: Annotated[tuple[Condition, ...], Field(max_length=16)] = Field(
        default=(),
        description="Resolved, Trained, Evaluated, GatePassed, Available, RolledOut, AcceptanceDegraded, "
        "Progressing, Suspended, Ready.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    resolved: Resolved | None = Field(default=None, description="The external inputs, pinned.")
    asked: Asked = ""
    stages: Annotated[tuple[StageStatus, ...], Field(max_length=len(StageName))] = Field(
        default=(),
        description="Stages, in their order.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    artifact: ArtifactRef | None = Field(default=None, description="The newest finished drafter.")
    revisions: Annotated[tuple[Revision, ...], Field(max_length=20)] = Field(
        default=(), description="Finished drafters, the newest first."
    )
    acceptance_length: AcceptanceStatus | None = Field(default=None, description="Evaluated and live.")
    tokens_per_second: ThroughputStatus | None = Field(default=None, description="Evaluated and live.")
    endpoint: str = Field(default="", max_length=512, description="URL of the Service, inside the cluster.")


class OspreyDrafter(ApiModel):
    """A speculative drafter for one served model: trained for it, measured, rolled out, and watched."""

    spec: OspreyDrafterSpec = Field(description="What the user wants.")
    status: OspreyDrafterStatus | None = Field(default=None, description="What is.")


PRINTER_COLUMNS = (
    {"name": "Ready", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].status'},
    {"name": "Stage", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Progressing")].message'},
    {"name": "AL", "type": "number", "jsonPath": ".status.acceptanceLength.evaluated"},
    {"name": "Live", "type": "number", "jsonPath": ".status.acceptanceLength.live"},
    {"name": "TPS", "type": "number", "jsonPath": ".status.tokensPerSecond.live"},
    {"name": "Reason", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].reason'},
    {"name": "Target", "type": "string", "jsonPath": ".spec.target.uri", "priority": 1},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
)
