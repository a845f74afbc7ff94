"""What both resources' status is made of."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from osprey_api.base import Sentence, StatusModel
from osprey_api.stages import ArtifactRef, ModelFacts, Pinned, PinnedData, StageName


class Condition(StatusModel):
    """One `metav1.Condition`."""

    type: str = Field(max_length=63, description="What is true, false or not known.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it is.")
    reason: str = Field(max_length=63, description="Why, as one word of a closed set.")
    message: Sentence = Field(default="", description="Why, as a sentence that says what to do.")
    last_transition_time: AwareDatetime = Field(description="When `status` last changed.")
    observed_generation: int | None = Field(default=None, description="Generation that this was judged for.")


class StageState(StrEnum):
    """Where a stage stands."""

    PENDING = "Pending"
    RUNNING = "Running"
    RETRYING = "Retrying"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class StageStatus(StatusModel):
    """One stage of a resource."""

    name: StageName = Field(description="The stage.")
    fingerprint: str = Field(default="", max_length=64, description="What the stage's result is addressed by.")
    job: str = Field(default="", max_length=63, description="The Job that ran it, or runs it.")
    state: StageState = Field(description="Where it stands.")
    attempts: int = Field(default=0, description="Jobs started for this fingerprint.")
    failures: int = Field(
        default=0, description="Those of them that failed and used up a retry: job.retries bounds it."
    )
    farthest_step: int | None = Field(
        default=None, description="The most steps that a failed one had done: one that gets further is getting on."
    )
    doubted: bool = Field(
        default=False,
        description="Its artifact is to be looked for in the store: what an earlier Job said is no proof.",
    )
    step: int | None = Field(default=None, description="Optimizer steps, or prompts, done.")
    total_steps: int | None = Field(default=None, description="Optimizer steps, or prompts, in all.")
    eta_seconds: int | None = Field(default=None, description="Seconds left, as estimated by the stage.")
    loss: float | None = Field(default=None, description="Last loss, in nats per token.")
    artifact: ArtifactRef | None = Field(default=None, description="What the stage made.")
    metrics: Annotated[dict[str, float], Field(max_length=64)] = Field(
        default_factory=dict, description="Headline figures of the stage, with seconds and peak_memory_bytes."
    )
    reason: str = Field(default="", max_length=63, description="Why it failed, as one word of a closed set.")
    message: Sentence = Field(default="", description="Why it failed, as a sentence.")
    next_attempt_time: AwareDatetime | None = Field(default=None, description="When it is tried again.")


Asked = Annotated[
    str,
    Field(
        max_length=64,
        description="Of osprey.dev/retry and the storage's endpoint: when it changes, finished artifacts are looked "
        "for again.",
    ),
]


class Resolved(StatusModel):
    """The external inputs, pinned."""

    fingerprint: str = Field(max_length=64, description="Of the resolve stage that found this.")
    model: Pinned = Field(description="The source LM, or the target.")
    facts: ModelFacts = Field(description="What the model is.")
    data: Annotated[tuple[PinnedData, ...], Field(max_length=32)] = Field(default=(), description="The data sources.")
