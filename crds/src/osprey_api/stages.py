"""What a stage's pod is told (`StageTask`) and what it answers (`Outcome`).

A config holds only what changes the result: it is hashed into the fingerprint. How the work is spread over
machines is `Execution` and is not. The task reaches the pod as JSON in the variable `OSPREY_TASK`; the outcome
leaves it as JSON in the termination message, which Kubernetes cuts at 4096 bytes.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from osprey_api.base import ApiModel, Digest, StatusModel
from osprey_api.conditions import FailureReason
from osprey_api.fingerprint import fingerprint
from osprey_api.rows import DEFAULT_MAX_DROPPED, Dropped

TASK_VARIABLE = "OSPREY_TASK"
ATTEMPT_VARIABLE = "OSPREY_ATTEMPT"
"""UID of the Job: files of an attempt lie under it until the manifest names them."""
GRACE_PERIOD_VARIABLE = "OSPREY_GRACE_PERIOD_SECONDS"
"""Seconds from SIGTERM to SIGKILL: within them a stage saves its checkpoint and says how it ended."""
SERVER_URL_VARIABLE = "OSPREY_SERVER_URL"
"""Base URL of the SGLang server of the pod, for the stages that are its clients."""
TERMINATION_MESSAGE_LIMIT = 4096


class StageName(StrEnum):
    """The stages, in the order in which a drafter meets them."""

    RESOLVE = "resolve"
    PRUNE = "prune"
    TOKENIZE = "tokenize"
    PRETRAIN = "pretrain"
    REGENERATE = "regenerate"
    CAPTURE = "capture"
    ADOPT = "adopt"
    CONVERT = "convert"
    DISTIL = "distil"
    BASELINE = "baseline"
    EVALUATE = "evaluate"


CODE_VERSION: dict[StageName, int] = dict.fromkeys(StageName, 1) | {
    StageName.TOKENIZE: 3,
    StageName.PRETRAIN: 2,
    StageName.REGENERATE: 2,
    StageName.BASELINE: 2,
    StageName.EVALUATE: 2,
    StageName.ADOPT: 2,
    StageName.CONVERT: 3,
    StageName.DISTIL: 2,
}
"""Raise a stage's number when its code gives another result, by more than rounding, for the same config and inputs."""


class ArtifactRef(ApiModel):
    """A finished artifact, or a published model: its folder, and the digest of its files."""

    uri: str = Field(max_length=1024)
    """Folder of the artifact; it holds manifest.json, or the config.json of a published model."""
    digest: Digest
    """SHA-256 of the canonical JSON of the files' paths, sizes and SHA-256."""


class Pinned(ApiModel):
    """An external input as `resolve` found it. Later stages read exactly this, or fail."""

    uri: str = Field(max_length=1024)
    """As in the resource's spec."""
    revision: str | None = Field(default=None, max_length=128)
    """Commit of a hub repository; None elsewhere."""
    digest: Digest | None = None
    """Digest of the content; None for a hub repository, whose commit says it."""


class PromptSource(ApiModel):
    """Prompts of one domain, one a row."""

    name: str
    source: Pinned
    prompt_field: str | None
    """Holds a user's message, or a list of messages; None: recognised by its name."""
    max_dropped: float = DEFAULT_MAX_DROPPED
    samples: int | None
    """Prompts to answer for training, after the held-out ones were set aside; None: all."""
    train: bool
    evaluate: bool


class HeldOut(ApiModel):
    """Which prompts are kept for evaluation.

    Of each domain the `samples` ones whose SHA-256(seed + newline + prompt) is smallest: chosen by content, so
    that no prompt is on both sides. A user's lone message counts by its text, a conversation by all of it.
    """

    samples: int
    seed: int


class Engine(ApiModel):
    """The server that answers, as far as it changes the answers or their time."""

    version: str
    server_args: tuple[str, ...] = ()
    tensor_parallel: int = 1
    gpu_product: str | None = None
    """Set for the stages that measure time."""


class Speculation(ApiModel):
    """SGLang's chain or tree of drafted tokens."""

    steps: int = Field(default=5, ge=1, le=16, description="Drafter steps per verification.")
    top_k: int = Field(default=1, ge=1, le=16, description="Branches per step; 1 drafts a chain.")
    draft_tokens: int = Field(
        default=6,
        ge=2,
        le=128,
        description="Tokens given to the target per verification: steps + 1 for a chain.",
    )


class ResolveConfig(ApiModel):
    """Pin the external inputs of a resource, and check that its storage can be used."""

    stage: Literal[StageName.RESOLVE] = StageName.RESOLVE
    model: Pinned
    """The source LM of a backbone, the target of a drafter; its `revision` is a branch, tag or commit."""
    data: tuple["DataToResolve", ...] = ()
    teaches: bool = True
    """Of a target: the trainer has to run it, and not only SGLang."""
    owner_uid: str
    """UID of the resource: what was pinned for another one is not reused."""
    retry: str = ""
    """Value of the annotation osprey.dev/retry: another value resolves anew."""


class DataToResolve(ApiModel):
    """A data source, and where in a row its text or its prompt is."""

    name: str
    uri: str
    kind: Literal["Text", "Prompts"]
    field: str | None
    """None, of prompts: recognised by its name."""
    max_dropped: float = DEFAULT_MAX_DROPPED


class PruneConfig(ApiModel):
    """Keep the first `layers` decoder blocks of a source LM, its embedding, final norm and head."""

    stage: Literal[StageName.PRUNE] = StageName.PRUNE
    source: Pinned
    layers: int


class TextSource(ApiModel):
    """Text for Stage 2. Each row is a JSON object; `text_field` holds the text."""

    source: Pinned
    text_field: str
    max_dropped: float = DEFAULT_MAX_DROPPED


class TokenizeConfig(ApiModel):
    """Text -> token shards, with the tokenizer of the source LM."""

    stage: Literal[StageName.TOKENIZE] = StageName.TOKENIZE
    tokenizer: Pinned
    data: tuple[TextSource, ...]


class Optimization(ApiModel):
    """What the two training stages share. Sizes are global, so that the number of GPUs does not matter."""

    muon_scale: float | None = Field(default=None, exclude_if=lambda value: value is None)
    """Muon trains the matrices, at so many times the learning rate; None: AdamW does. That is left out of what is
    written, so that artifacts from before there was a choice keep their fingerprints."""
    learning_rate: float
    schedule: Literal["Cosine", "Constant"]
    warmup_ratio: float
    """Share of all steps over which the learning rate grows from 0."""
    weight_decay: float
    clip_norm: float
    ema_decay: float | None
    """Decay of the average of the weights that is exported; None exports the last weights."""
    global_batch_size: int
    """Sequences per optimizer step."""
    sequence_length: int
    """Tokens."""
    precision: Literal["BF16", "FP32"]
    seed: int


class PretrainConfig(ApiModel):
    """Stage 2: next-token prediction of the pruned LM on generic text."""

    stage: Literal[StageName.PRETRAIN] = StageName.PRETRAIN
    steps: int
    loss_vocab_size: int | None
    """Only the most frequent tokens of the text are predicted; None: all."""
    freeze_embedding: bool
    optimization: Optimization


class RegenerateConfig(ApiModel):
    """The target answers the training prompts."""

    stage: Literal[StageName.REGENERATE] = StageName.REGENERATE
    target: Pinned
    prompts: tuple[PromptSource, ...]
    held_out: HeldOut
    max_tokens: int
    temperature: float
    seed: int
    engine: Engine


class CaptureConfig(ApiModel):
    """The target's states of all answers, computed once and read by every drafter that learns from them."""

    stage: Literal[StageName.CAPTURE] = StageName.CAPTURE
    target: Pinned
    sequence_length: int
    """Tokens; a longer answer loses its end."""
    precision: Literal["BF16", "FP32"]


class ConvertConfig(ApiModel):
    """Stage 3: a backbone becomes the initial drafter of a target; without a backbone, EAGLE-3 from scratch."""

    stage: Literal[StageName.CONVERT] = StageName.CONVERT
    target: Pinned
    draft_vocab_size: int | None
    """None: the target's whole vocabulary."""
    seed: int


class AdoptConfig(ApiModel):
    """A finished drafter that is imported, in place of stages 3 and 4: held against its target, and taken over."""

    stage: Literal[StageName.ADOPT] = StageName.ADOPT
    target: Pinned


class DistilConfig(ApiModel):
    """Stage 4: the training-time-test unroll against the frozen target on its own answers."""

    stage: Literal[StageName.DISTIL] = StageName.DISTIL
    target: Pinned
    epochs: int
    unroll: int
    """Steps K of the unroll."""
    decay: float
    """The loss of step k weighs decay ** k."""
    step_weights: tuple[float, ...] | None = None
    """K weights in place of these."""
    loss: Literal["CrossEntropy", "LKAlpha", "LKLambda"] = "CrossEntropy"
    lk_decay: float = 3.0
    """Of LKLambda alone: its cross-entropy weighs exp(-lk_decay * acceptance)."""
    hard_label_weight: float = 0.0
    """Share of the cross-entropy against the target's most likely token."""
    freeze_embedding: bool
    teacher: Literal["Online", "Captured"]
    """Online: the target runs on every batch. Captured: its states are an input."""
    optimization: Optimization

    @property
    def loss_weights(self) -> tuple[float, ...]:
        """The weight of each of the K steps."""
        return self.step_weights or tuple(self.decay**step for step in range(self.unroll))


class BaselineConfig(ApiModel):
    """The target without a drafter on the held-out prompts: its outputs and its speed."""

    stage: Literal[StageName.BASELINE] = StageName.BASELINE
    target: Pinned
    prompts: tuple[PromptSource, ...]
    held_out: HeldOut
    max_tokens: int
    concurrency: int
    engine: Engine


class EvaluateConfig(ApiModel):
    """The target with the drafter on the same prompts: acceptance length, speed, equality of the outputs."""

    stage: Literal[StageName.EVALUATE] = StageName.EVALUATE
    target: Pinned
    prompts: tuple[PromptSource, ...]
    held_out: HeldOut
    max_tokens: int
    concurrency: int
    engine: Engine
    speculation: Speculation


StageConfig = Annotated[
    ResolveConfig
    | PruneConfig
    | TokenizeConfig
    | PretrainConfig
    | RegenerateConfig
    | CaptureConfig
    | AdoptConfig
    | ConvertConfig
    | DistilConfig
    | BaselineConfig
    | EvaluateConfig,
    Field(discriminator="stage"),
]


class InputRole(StrEnum):
    """What an input artifact is to a stage. The word is also the key of `StageTask.inputs`."""

    BACKBONE = "backbone"
    """To pretrain: the pruned LM. To convert: the finished backbone."""
    TOKENS = "tokens"
    ANSWERS = "answers"
    STATES = "states"
    DRAFTER = "drafter"
    """To distil: the initial drafter. To evaluate: the finished one. To adopt: the imported one."""
    BASELINE = "baseline"


class StorageLocation(ApiModel):
    """Where artifacts lie. Keys come from the environment or the pod's identity, never from here."""

    uri: str
    """`s3://BUCKET/PREFIX`, or `file:///FOLDER` for work on one machine."""
    endpoint: str | None = None
    region: str | None = None


class Execution(ApiModel):
    """How a stage's work is spread and saved. Changes nothing in the result."""

    nodes: int = 1
    processes_per_node: int = 1
    zero_stage: int = Field(default=1, ge=0, le=3)
    checkpoint_every_steps: int = 500
    checkpoints_kept: int = 2
    concurrency: int = Field(default=64, ge=1)
    """Requests in flight of regenerate; the stages that measure time have their own in their config."""
    captured_gib_limit: int = Field(default=1024, ge=1)
    """Most GiB that capture may write."""
    captured_shard_bytes: int = Field(default=1 << 30, ge=1)
    """About the size of a file of captured states: what a process holds on its disk, and loses when it ends."""
    teacher_tensor_parallel: int = Field(default=1, ge=1)
    """Processes that share the target where it teaches; it divides their number."""


class StageTask(ApiModel):
    """Everything that a stage's pod needs to know."""

    fingerprint: str
    namespace: str
    resource: str
    """`ospreydrafter/NAME`, for logs and provenance."""
    storage: StorageLocation
    config: StageConfig
    inputs: dict[InputRole, ArtifactRef] = Field(default_factory=dict)
    execution: Execution = Field(default_factory=Execution)

    @property
    def stage(self) -> StageName:
        """The stage to run."""
        return self.config.stage

    @property
    def prefix(self) -> str:
        """The URI of the stage's artifact: `<storage>/<namespace>/<stage>/<fingerprint>`."""
        return f"{self.storage.uri.rstrip('/')}/{self.namespace}/{self.stage}/{self.fingerprint}"


def stage_fingerprint(config: StageConfig, inputs: dict[InputRole, ArtifactRef]) -> str:
    """Return the fingerprint of a stage: 64 hex digits over its config and the digests of its inputs."""
    wire: JsonValue = config.model_dump(mode="json")
    return fingerprint(
        stage=config.stage,
        code_version=CODE_VERSION[config.stage],
        config=wire,
        inputs={role.value: ref.digest for role, ref in inputs.items()},
    )


# ------------------------------------------------------------------------------------------ answers
# Of another version they may have more fields, also after a rollback: those are left alone.


class ModelFacts(StatusModel):
    """What a model's config and weights say of it."""

    architecture: str = Field(max_length=128)
    """First entry of the config's `architectures`."""
    layers: int
    """Decoder blocks."""
    hidden_size: int
    """Width of the hidden states."""
    vocab_size: int
    """Rows of the embedding, padding included."""
    size_bytes: int
    """Size of the weights."""


class PinnedData(StatusModel):
    """A data source as resolved."""

    name: str = Field(max_length=63)
    """The source's name in the resource."""
    source: Pinned
    """What was found."""
    rows: int | None = None
    """Those of use; None where counting would mean to download a hub data set."""
    dropped: Dropped = Field(default_factory=dict)
    """Rows that are of no use, by the most frequent reasons; of a hub data set, among its first ones."""


class ResolveResult(StatusModel):
    """The pinned inputs."""

    stage: Literal[StageName.RESOLVE] = StageName.RESOLVE
    model: Pinned
    facts: ModelFacts
    data: tuple[PinnedData, ...] = ()


class PruneResult(StatusModel):
    """Size of the pruned LM."""

    stage: Literal[StageName.PRUNE] = StageName.PRUNE
    parameters: int


class TokenizeResult(StatusModel):
    """Rows and tokens."""

    stage: Literal[StageName.TOKENIZE] = StageName.TOKENIZE
    rows: int
    """Documents."""
    tokens: int
    rows_read: int = 0
    dropped: Dropped = Field(default_factory=dict)
    """Rows that are no document, by reason: with `rows` they add up to `rows_read`."""


class PretrainResult(StatusModel):
    """The end of Stage 2. Losses in nats per token."""

    stage: Literal[StageName.PRETRAIN] = StageName.PRETRAIN
    steps: int
    tokens: int
    first_loss: float
    final_loss: float


class RegenerateResult(StatusModel):
    """What the target answered."""

    stage: Literal[StageName.REGENERATE] = StageName.REGENERATE
    prompts: int
    answer_tokens: int
    cut_at_limit: int
    """Answers that ended because they reached `max_tokens`."""
    skipped: int
    """Prompts that did not fit the target's context."""
    tokens_per_second: float
    refused: int = 0
    """Prompts that the target's chat template refused."""
    rows_read: int = 0
    """Rows of all sources, the held-out ones included."""
    rows_kept: int = 0
    """Rows with a prompt. Not all are asked: some are the same, held out, or beyond `samples`."""
    dropped: Dropped = Field(default_factory=dict)
    """Rows without a prompt, by reason: with `rows_kept` they add up to `rows_read`."""


class CaptureResult(StatusModel):
    """What was captured."""

    stage: Literal[StageName.CAPTURE] = StageName.CAPTURE
    dialogues: int
    tokens: int
    """Of prompts and answers."""
    size_bytes: int
    """Of all states: every epoch of a drafter reads as much."""


class AdoptResult(StatusModel):
    """What was imported."""

    stage: Literal[StageName.ADOPT] = StageName.ADOPT
    parameters: int
    layers: int
    """Decoder blocks."""
    draft_vocab_size: int
    """Tokens of the target that it can propose."""
    vocabulary_compared: bool = False
    """The drafter says of which tokens its target was, and they are this target's; else their number alone is known."""


class ConvertResult(StatusModel):
    """How the drafter's vocabulary came to be."""

    stage: Literal[StageName.CONVERT] = StageName.CONVERT
    parameters: int
    rows_copied: int
    rows_composed: int
    rows_left: int
    coverage: float
    """Share of the answers' tokens that the draft vocabulary holds."""


class DistilResult(StatusModel):
    """The end of Stage 4. Losses in nats per supervised token."""

    stage: Literal[StageName.DISTIL] = StageName.DISTIL
    steps: int
    supervised_tokens: int
    """Answer tokens that were trained on, over all epochs."""
    first_loss: float
    final_loss: float
    simulated_acceptance_length: float
    """On training answers, counted as SGLang counts, by teacher-forced greedy chains of `unroll` tokens."""


class BaselineResult(StatusModel):
    """Speed without a drafter."""

    stage: Literal[StageName.BASELINE] = StageName.BASELINE
    requests: int
    tokens_per_second: float


class DomainAcceptance(StatusModel):
    """One domain's share of an evaluation."""

    name: str
    requests: int
    acceptance_length: float
    acceptance_length_corpus: float
    tokens_per_second: float
    baseline_tokens_per_second: float


class EvaluateResult(StatusModel):
    """What the drafter is worth, as SGLang served it."""

    stage: Literal[StageName.EVALUATE] = StageName.EVALUATE
    requests: int
    requests_without_verify_step: int = 0
    """Answers that ended with their first token: no draft was ever judged."""
    acceptance_length: float
    """Mean over requests of completion tokens / verify steps; requests without a verify step are left out."""
    acceptance_length_corpus: float
    """All completion tokens / all verify steps."""
    acceptance_by_position: tuple[float, ...]
    """Share of verify steps in which the drafted token at position 1, 2, … was accepted."""
    by_domain: tuple[DomainAcceptance, ...]
    tokens_per_second: float
    baseline_tokens_per_second: float
    identical_outputs: float
    """Share of requests whose output ids equal the baseline's."""


StageResult = Annotated[
    ResolveResult
    | PruneResult
    | TokenizeResult
    | PretrainResult
    | RegenerateResult
    | CaptureResult
    | AdoptResult
    | ConvertResult
    | DistilResult
    | BaselineResult
    | EvaluateResult,
    Field(discriminator="stage"),
]


class Outcome(StatusModel):
    """The termination message. Either `failure` is unset and `result` is there, or the other way round."""

    failure: FailureReason | None = None
    message: str = ""
    artifact: ArtifactRef | None = None
    """None for resolve, whose result is all there is."""
    result: StageResult | None = None
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    """Of the stage's processes together."""
    reused: bool = False
    """The artifact was there already."""
