"""Parts of spec that both resources have."""

import json
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue
from pydantic.config import JsonDict

from osprey_api.base import ApiModel, Digest, SubdomainName
from osprey_api.sources import SOURCE_PATTERN
from osprey_api.stages import StageName


def _said_in_words(message: str, *rules: JsonDict) -> Callable[[JsonDict], None]:
    """Turn a field's pattern into a rule with a message: of a pattern the API server only shows the expression."""

    def change(schema: JsonDict) -> None:
        rule = f"self.matches({json.dumps(schema.pop('pattern'))})"
        schema["x-kubernetes-validations"] = [{"rule": rule, "message": message}, *rules]

    return change


def _s3_uri(path: str, *, max_length: int) -> Any:
    """A field with the URI of a folder in S3, whose path after the bucket matches `path`."""
    return Field(
        max_length=max_length,
        pattern=rf"^s3://[a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9]{path}$",
        json_schema_extra=_said_in_words("write s3://BUCKET/PREFIX"),
    )


SourceUri = Annotated[
    str,
    Field(
        max_length=1024,
        pattern=SOURCE_PATTERN,
        json_schema_extra=_said_in_words(
            "write hf://OWNER/NAME, s3://BUCKET/PATH or pvc://CLAIM/PATH",
            {
                "rule": "!self.startsWith('pvc://') || !(self.contains('/../') || self.endsWith('/..'))",
                "message": "a path cannot leave its claim: write it without '..'",
            },
        ),
    ),
]
MaxDropped = Annotated[
    float,
    Field(
        ge=0,
        le=1,
        description="Share of the rows that may be dropped because they are broken or odd; beyond it nothing is begun. "
        "Blank texts and prompts that are too long are counted, but not against it.",
    ),
]
PodTemplate = Annotated[
    dict[str, JsonValue],
    Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}),
]
"""A PodTemplateSpec fragment. Not described here: the API server checks the whole Job, or Deployment, as it is made."""


class ModelSource(ApiModel):
    """A causal language model in the Hugging Face layout."""

    uri: SourceUri = Field(description="Where the model is: hf://OWNER/NAME, s3://BUCKET/PREFIX or pvc://CLAIM/PATH.")
    revision: str = Field(
        default="main",
        max_length=128,
        description="Branch, tag or commit of a hub model; ignored for the other sources.",
    )


class ImportedArtifact(ApiModel):
    """A finished artifact that Osprey made elsewhere, or a published model in the Hugging Face layout."""

    uri: Annotated[str, _s3_uri("/.+", max_length=1024)] = Field(
        description="Folder of the artifact, s3://BUCKET/PREFIX: the one with the manifest.json that Osprey wrote, or "
        "with the config.json, the weights and, of a backbone, the tokenizer of a published model. It is read with the "
        "endpoint and the keys of the drafter's storage."
    )
    digest: Digest = Field(
        description="Digest of its files, as status.artifact.digest of its maker shows it; it is checked. Where it is "
        "wrong, as it may be the first time for a published model, the message tells the right one."
    )


class Storage(ApiModel):
    """Where artifacts and checkpoints are kept."""

    uri: Annotated[str, _s3_uri("(/.*)?", max_length=512)] = Field(description="s3://BUCKET/PREFIX.")
    endpoint: Annotated[str, Field(max_length=512, pattern=r"^https?://.+$")] | None = Field(
        default=None, description="URL of an S3-compatible store; unset for AWS."
    )
    region: Annotated[str, Field(max_length=64)] | None = Field(
        default=None, description="Region of the bucket; unset where the store has none."
    )
    credentials_secret: SubdomainName | None = Field(
        default=None,
        description="Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; unset where the pods' "
        "service account gives access.",
    )


class ModelCache(ApiModel):
    """A claim that keeps downloaded models, so that not every pod downloads them again."""

    claim: SubdomainName = Field(description="A PersistentVolumeClaim that several pods can mount.")


class StageOverrides(ApiModel):
    """Overrides of `spec.job` for one stage."""

    template: PodTemplate | None = Field(
        default=None,
        description="Strategic merge into the stage's pod template, after job.template. "
        "The containers are named stage and, where the stage talks to a server, server.",
    )
    deadline_seconds: Annotated[int, Field(ge=60, le=31536000)] | None = Field(
        default=None, description="The stage's Job may take this long; unset: the job's."
    )


class JobSettings(ApiModel):
    """How the stages' Jobs run."""

    nodes: int = Field(default=1, ge=1, le=256, description="Pods of a training stage.")
    gpus_per_node: int = Field(
        default=1, ge=0, le=64, description="GPUs, and so processes, per pod of a training stage; 0: CPU."
    )
    zero_stage: Annotated[int, Field(ge=0, le=3)] = Field(
        default=1, description="DeepSpeed ZeRO stage of the training stages."
    )
    checkpoint_every_steps: int = Field(
        default=500, ge=1, le=1000000, description="Optimizer steps between two checkpoints."
    )
    checkpoints_kept: int = Field(default=2, ge=1, le=100, description="Complete checkpoints kept per stage.")
    grace_period_seconds: int = Field(
        default=300,
        ge=10,
        le=86400,
        description="Time that a stopped pod has to save its checkpoint, in seconds.",
    )
    deadline_seconds: int = Field(
        default=604800, ge=60, le=31536000, description="A stage's Job may take this long, in seconds."
    )
    retries: int = Field(
        default=3,
        ge=0,
        le=100,
        description="How often a stage that failed for a passing reason is tried again.",
    )
    queue: Annotated[str, Field(min_length=1, max_length=63)] | None = Field(
        default=None, description="Kueue LocalQueue of the Jobs."
    )
    template: PodTemplate | None = Field(
        default=None, description="Strategic merge into the pod template of every stage."
    )
    stages: Annotated[dict[StageName, StageOverrides], Field(max_length=len(StageName))] = Field(
        default_factory=dict,
        description="Overrides for one stage, by its name.",
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": f"self.all(stage, stage in {[str(stage) for stage in StageName]})",
                    "message": f"the stages are {', '.join(StageName)}",
                }
            ]
        },
    )


class TrainingOptimization(ApiModel):
    """What Stage 2 and Stage 4 share."""

    optimizer: Literal["AdamW", "Muon"] = Field(
        default="AdamW",
        description="Muon: the matrices between embedding and head are trained with Muon, all else with AdamW; it "
        "needs job.zeroStage 0.",
    )
    muon_scale: float = Field(
        default=3.0,
        gt=0,
        le=100,
        description="With Muon: its learning rate, and its weight decay, are those of AdamW times this.",
    )
    schedule: Literal["Cosine", "Constant"] = Field(
        default="Cosine", description="Learning rate after the warm-up: down along a cosine, or constant."
    )
    weight_decay: float = Field(default=0.0, ge=0, le=1, description="Decoupled weight decay.")
    clip_norm: float = Field(default=1.0, gt=0, le=1000, description="Gradients are clipped to this global norm.")
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Export an exponential average of the weights with this decay; unset: the last weights.",
    )
    precision: Literal["BF16", "FP32"] = Field(
        default="BF16", description="Precision of the matrix products; weights are kept in FP32."
    )
    seed: int = Field(default=0, ge=0, le=2147483647, description="Seed of sampling and initialisation.")


def training_rules(part: str) -> list[JsonDict]:
    """Return the rules of a resource's spec about its training stage and the processes that it is spread over."""
    return [
        {
            "rule": f"!has(self.{part}) || self.{part}.globalBatchSize % "
            "(self.job.nodes * (self.job.gpusPerNode > 0 ? self.job.gpusPerNode : 1)) == 0",
            "message": f"every process takes the same number of sequences: set {part}.globalBatchSize to a multiple of "
            "job.nodes times job.gpusPerNode",
        },
        {
            "rule": f"!has(self.{part}) || !has(self.{part}.emaDecay) || self.job.zeroStage != 3",
            "message": f"with job.zeroStage 3 no process has all weights to average: unset {part}.emaDecay, "
            "or set zeroStage to 2",
        },
        {
            "rule": f"!has(self.{part}) || self.{part}.optimizer != 'Muon' || self.job.zeroStage == 0",
            "message": f"Muon needs whole matrices, which ZeRO splits: set job.zeroStage to 0, or {part}.optimizer "
            "to AdamW",
        },
    ]


class DeletionPolicy(StrEnum):
    """What happens to artifacts when the resource is deleted."""

    RETAIN = "Retain"


class ResourceSpec(ApiModel):
    """What both resources ask of storage, downloads and Jobs."""

    storage: Storage | None = Field(default=None, description="Unset: the operator's default.")
    hub_credentials_secret: SubdomainName | None = Field(
        default=None, description="Secret with HF_TOKEN, for gated models and data."
    )
    model_cache: ModelCache | None = Field(default=None, description="Keeps downloaded models.")
    job: JobSettings = Field(default_factory=JobSettings, description="How the stages' Jobs run.")
    suspend: bool = Field(
        default=False,
        description="Stop the Jobs, keep their checkpoints, and start nothing; servers that there are stay.",
    )
    deletion_policy: DeletionPolicy = Field(
        default=DeletionPolicy.RETAIN, description="What happens to artifacts when this is deleted."
    )
