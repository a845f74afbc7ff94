"""`OspreyBackbone`: a pruned and pretrained drafter body, target-agnostic, made once and shared by many drafters."""

from typing import Annotated

from pydantic import ConfigDict, Field

from osprey_api.base import ApiModel, StatusModel
from osprey_api.common import (
    ImportedArtifact,
    MaxDropped,
    ModelSource,
    ResourceSpec,
    SourceUri,
    TrainingOptimization,
    training_rules,
)
from osprey_api.rows import DEFAULT_MAX_DROPPED
from osprey_api.stages import ArtifactRef, StageName
from osprey_api.status import Asked, Condition, Resolved, StageStatus

KIND = "OspreyBackbone"
PLURAL = "ospreybackbones"
DEFAULT_LAYERS = 2
SHORT_NAMES = ("ob",)


class TextData(ApiModel):
    """Text to pretrain on."""

    uri: SourceUri = Field(
        description="hf://OWNER/NAME?name=CONFIG&split=SPLIT or hf://OWNER/NAME?file=PATH, or a file or a folder "
        "of files: s3://BUCKET/KEY, pvc://CLAIM/PATH. JSON Lines, a JSON list, Parquet or plain text."
    )
    text_field: Annotated[str, Field(min_length=1, max_length=128)] = Field(
        default="text", description="Field of a row that holds the text."
    )
    max_dropped: MaxDropped = DEFAULT_MAX_DROPPED


class Pretraining(TrainingOptimization):
    """Stage 2: next-token prediction on generic text restores the pruned LM."""

    data: Annotated[tuple[TextData, ...], Field(min_length=1, max_length=8)] = Field(
        description="Text, mixed in proportion to its length."
    )
    steps: int = Field(default=10000, ge=1, le=10000000, description="Optimizer steps.")
    sequence_length: int = Field(default=4096, ge=16, le=1048576, description="Tokens per sequence.")
    global_batch_size: int = Field(
        default=2048,
        ge=1,
        le=1048576,
        description="Sequences per optimizer step, over all processes, whose number must divide it.",
    )
    learning_rate: float = Field(default=1e-4, gt=0, le=1, description="Peak learning rate.")
    warmup_ratio: float = Field(default=0.01, ge=0, lt=1, description="Share of the steps that warm up.")
    loss_vocab_size: Annotated[int, Field(ge=16, le=1048576)] | None = Field(
        default=None,
        description="Learn to predict only so many of the text's most frequent tokens; unset: all. "
        "On CPUs, where the head takes most of the time, a few thousand are several times faster.",
    )
    freeze_embedding: bool = Field(
        default=False, description="Keep the embedding, and a head that is tied to it, as they are."
    )


class OspreyBackboneSpec(ResourceSpec):
    """What the user wants."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "has(self.source) != has(self.__import__)",
                    "message": "set source (a language model to prune) or import (a finished backbone), and not both",
                },
                {
                    "rule": "!has(self.__import__) || !has(self.pretraining)",
                    "message": "an imported backbone is finished: remove pretraining, or set source instead of import",
                },
                {
                    "rule": f"!has(self.__import__) || self.layers == {DEFAULT_LAYERS}",
                    "message": "an imported backbone has the blocks that it was made with: remove layers",
                },
                *training_rules("pretraining"),
            ]
        }
    )

    source: ModelSource | None = Field(default=None, description="The language model to prune.")
    layers: int = Field(default=DEFAULT_LAYERS, ge=1, le=8, description="Decoder blocks kept, from the first one.")
    pretraining: Pretraining | None = Field(default=None, description="Stage 2; unset: the backbone is pruned only.")
    import_: ImportedArtifact | None = Field(
        default=None, alias="import", description="A finished backbone, in place of source."
    )


class OspreyBackboneStatus(StatusModel):
    """What is."""

    observed_generation: int | None = Field(default=None, description="Generation that this status is about.")
    conditions: Annotated[tuple[Condition, ...], Field(max_length=16)] = Field(
        default=(),
        description="Resolved, Ready, Progressing, Suspended.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    resolved: Resolved | None = Field(default=None, description="The external inputs, pinned.")
    asked: Asked = ""
    stages: Annotated[tuple[StageStatus, ...], Field(max_length=len(StageName))] = Field(
        default=(),
        description="Stages, in their order.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    artifact: ArtifactRef | None = Field(default=None, description="The finished backbone.")


class OspreyBackbone(ApiModel):
    """A drafter body: pruned from a language model, restored by pretraining, and shared by many drafters."""

    spec: OspreyBackboneSpec = Field(description="What the user wants.")
    status: OspreyBackboneStatus | None = Field(default=None, description="What is.")


PRINTER_COLUMNS = (
    {"name": "Ready", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].status'},
    {"name": "Stage", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Progressing")].message'},
    {"name": "Layers", "type": "integer", "jsonPath": ".spec.layers"},
    {"name": "Reason", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].reason'},
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
)
