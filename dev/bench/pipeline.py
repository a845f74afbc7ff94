"""What lies around the training step: data, teacher, checkpoints, storage, and the server that answers prompts.

All of it is real: the stages as their pods run them, SeaweedFS as S3, SGLang on the CPU.
"""

import asyncio
import json
import math
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from dev import models, stages
from dev.bench import measure
from dev.bench.inputs import SEQUENCE_LENGTH, dialogues
from dev.bench.measure import Spread
from dev.cpu_kernels import launch
from dev.demo.sites import variables
from dev.services import REGION, S3Server
from osprey_api.stages import (
    ArtifactRef,
    CaptureConfig,
    ConvertConfig,
    DistilConfig,
    Engine,
    Execution,
    HeldOut,
    InputRole,
    Optimization,
    Outcome,
    Pinned,
    RegenerateConfig,
    RegenerateResult,
    StageConfig,
    StageTask,
    StorageLocation,
    stage_fingerprint,
)
from osprey_runtime import manifest
from osprey_runtime.store import Store, open_store
from osprey_serving.client import Client, Completion, Connection, Request
from osprey_trainer.training import COST_LINE

BUCKET = "bench"
INTERVAL = 100
"""Steps between two checkpoints, as the demonstration has it."""
_EPOCHS = 5
_EVERY = 20
_TRANSFERRED = 256 << 20
_CONCURRENCY = 16
_MAX_TOKENS = 32
_START_S = 900


@dataclass(frozen=True)
class Tokenization:
    """Tokens a second.

    Attributes:
        stage: from rows to shards.
        encode_batch: of `tokenizers`, on the same documents in memory.
    """

    stage: Spread
    encode_batch: Spread
    ratio: float


@dataclass(frozen=True)
class Storage:
    """Seconds for the same bytes, ours and boto3's own transfers; ratios of the medians."""

    mib: int
    write: Spread
    plain_write: Spread
    write_ratio: float
    read: Spread
    plain_read: Spread
    read_ratio: float


@dataclass(frozen=True)
class Distillation:
    """Of whole runs of distil with captured states in S3.

    Attributes:
        waiting: share of the steps' time.
        seconds_a_step: without checkpoints.
        seconds_a_checkpoint: that a run takes longer for each.
        checkpoint_share: of these in `INTERVAL` steps.
        cost: of a run, as its log says.
    """

    waiting: Spread
    seconds_a_step: Spread
    seconds_a_checkpoint: float
    checkpoint_share: float
    cost: Mapping[str, float]


@dataclass(frozen=True)
class Regeneration:
    """Of the requests to a server.

    Attributes:
        full: share of the time, until the last request was sent, in which `concurrency` of them were in flight.
    """

    concurrency: int
    requests: int
    full: float
    tokens_per_second: float


@dataclass(frozen=True)
class Pipeline:
    """All of it."""

    tokenization: Tokenization
    storage: Storage
    distillation: Distillation
    regeneration: Regeneration


def measured(*, repeats: int) -> Pipeline:
    """Measure all of it."""
    with tempfile.TemporaryDirectory(prefix="osprey-bench-") as name:
        folder = Path(name)
        with s3(folder / "s3") as server:
            storage = transfers(server, folder, repeats=repeats)
            distillation = distil(server, folder, repeats=repeats)
        return Pipeline(
            tokenization=tokenization(repeats=repeats),
            storage=storage,
            distillation=distillation,
            regeneration=regenerate(folder),
        )


@contextmanager
def s3(state: Path) -> Iterator[S3Server]:
    """A real S3 server with an empty bucket, and its keys in this process's environment."""
    with S3Server(state) as server, variables(_keys(server)):
        _plain(server).create_bucket(Bucket=BUCKET)
        yield server


def tokenization(*, repeats: int) -> Tokenization:
    """Tokenize the demonstration's text, each time in a process of its own."""
    runs = [measure.in_process("dev.bench.tokenization", {}) for _ in range(repeats)]
    stage, plain = (Spread.of([run[side] for run in runs]) for side in ("stage", "encode_batch"))
    return Tokenization(stage, plain, stage.median / plain.median)


def transfers(server: S3Server, folder: Path, *, repeats: int) -> Storage:
    """Write and read the same bytes through our store and by boto3, in turn."""
    source, target = folder / "bytes", folder / "read"
    source.write_bytes(os.urandom(_TRANSFERRED))
    store, plain = _store(server), _plain(server)
    found: dict[str, list[float]] = {name: [] for name in ("write", "plain_write", "read", "plain_read")}
    for repeat in range(repeats):
        key = f"transfers/{repeat}"
        actions = {
            "write": lambda key=key: store.upload(source, f"{key}/ours"),
            "plain_write": lambda key=key: plain.upload_file(str(source), BUCKET, f"{key}/plain"),
            "read": lambda key=key: store.download(f"{key}/ours", target),
            "plain_read": lambda key=key: plain.download_file(BUCKET, f"{key}/plain", str(target)),
        }
        for name, action in actions.items():
            found[name] += measure.seconds(action, 1)[0]
    spreads = {name: Spread.of(values) for name, values in found.items()}
    return Storage(
        mib=_TRANSFERRED >> 20,
        write_ratio=spreads["write"].median / spreads["plain_write"].median,
        read_ratio=spreads["read"].median / spreads["plain_read"].median,
        **spreads,
    )


def distil(server: S3Server, folder: Path, *, repeats: int) -> Distillation:
    """Distil as the demonstration does, with and without checkpoints in turn."""
    run = _Stages(server, folder)
    answers = run.answers()
    target = Pinned(uri=f"pvc://models/{models.NAME}")
    drafter = run.stage(ConvertConfig(target=target, draft_vocab_size=4096, seed=0), {InputRole.ANSWERS: answers})
    states = run.stage(
        CaptureConfig(target=target, sequence_length=SEQUENCE_LENGTH, precision="FP32"), {InputRole.ANSWERS: answers}
    )
    inputs = {
        InputRole.ANSWERS: answers,
        InputRole.DRAFTER: _artifact(drafter[0]),
        InputRole.STATES: _artifact(states[0]),
    }
    optimization = Optimization(
        learning_rate=1e-3, schedule="Constant", warmup_ratio=0.04, weight_decay=0.0, clip_norm=1.0, ema_decay=0.98,
        global_batch_size=4, sequence_length=SEQUENCE_LENGTH, precision="FP32", seed=0,
    )  # fmt: skip
    config = DistilConfig(
        target=target, epochs=_EPOCHS, unroll=4, decay=0.8, freeze_embedding=True, teacher="Captured",
        optimization=optimization,
    )  # fmt: skip
    steps = math.ceil(_EPOCHS * len(dialogues()) / optimization.global_batch_size)
    costs: dict[int, list[dict[str, float]]] = {steps + 1: [], _EVERY: []}
    for repeat in range(repeats):
        for every, found in costs.items():
            _, log = run.stage(config, inputs, every=every, name=f"distil-{every}-{repeat}")
            found.append(cost_of(log))
    return distillation(costs[steps + 1], costs[_EVERY], steps=steps, checkpoints=(steps - 1) // _EVERY)


def distillation(
    plain: Sequence[Mapping[str, float]], saved: Sequence[Mapping[str, float]], *, steps: int, checkpoints: int
) -> Distillation:
    """Compare runs without checkpoints with runs that wrote some.

    Args:
        plain: cost of each run without.
        saved: and with them.
        steps: of a run.
        checkpoints: of a run with them.
    """
    step = Spread.of([cost["seconds_of_steps"] / steps for cost in plain])
    seconds = {name: Spread.of([cost["seconds"] for cost in runs]) for name, runs in (("p", plain), ("s", saved))}
    more = max(0.0, seconds["s"].median - seconds["p"].median) / checkpoints
    return Distillation(
        waiting=Spread.of([cost["waiting"] for cost in plain]),
        seconds_a_step=step,
        seconds_a_checkpoint=more,
        checkpoint_share=more / (INTERVAL * step.median),
        cost=plain[0],
    )


def cost_of(log: str) -> dict[str, float]:
    """Find what a training stage says of its cost in its log.

    Raises:
        ValueError: it says nothing.
    """
    for line in reversed(log.splitlines()):
        _, found, words = line.partition(COST_LINE)
        if found:
            cost: dict[str, float] = json.loads(words)
            return cost
    raise ValueError("the log does not say what the stage cost")


def regenerate(folder: Path) -> Regeneration:
    """Ask a real server as regenerate does."""
    asked = dialogues()
    requests = [Request(tuple(map(int, each.prompt_ids)), _MAX_TOKENS) for each in asked]
    answers: list[Completion] = []

    async def ask(url: str) -> None:
        async with Client(Connection(url), threading.Event()) as client:
            await client.wait_ready(_START_S)
            items = ((request, request) for request in requests)
            await client.generate_all(items, _CONCURRENCY, lambda _, answer: answers.append(answer))

    with launch.sglang_server(
        models.folder(),
        log=folder / "server.log",
        base_environment=os.environ,  # noqa: TID251 - a command's own
        timeout_s=_START_S,
    ) as server:
        asyncio.run(ask(server.url))
    times = [(answer.started_s, answer.started_s + answer.latency_s) for answer in answers]
    took = max(end for _, end in times) - min(start for start, _ in times)
    tokens = sum(answer.completion_tokens for answer in answers)
    return Regeneration(_CONCURRENCY, len(answers), full_share(times, _CONCURRENCY), tokens / took)


def full_share(times: Sequence[tuple[float, float]], concurrency: int) -> float:
    """Return the share of the time until the last request began in which so many were in flight.

    Args:
        times: begin and end of each request.
        concurrency: requests.
    """
    events = sorted([(start, 1) for start, _ in times] + [(end, -1) for _, end in times])
    first, last = events[0][0], max(start for start, _ in times)
    full, running, before = 0.0, 0, first
    for at, change in events:
        if running >= concurrency:
            full += max(0.0, min(at, last) - before)
        running, before = running + change, min(at, last)
    return full / (last - first) if last > first else 1.0


@dataclass(frozen=True)
class _Stages:
    """Stages as their pods run them, on the storage of a server."""

    server: S3Server
    folder: Path

    def stage(
        self, config: StageConfig, inputs: Mapping[InputRole, ArtifactRef], *, every: int = 500, name: str = ""
    ) -> tuple[Outcome, str]:
        """Run a stage; return what came of it, and its log.

        Args:
            config: of the stage.
            inputs: artifacts by role.
            every: steps between two checkpoints.
            name: where a stage runs more than once, and is to do so.
        """
        task = self._task(config, inputs, name=name, every=every)
        scratch = self.folder / "scratch" / (name or config.stage)
        environment = {**_keys(self.server), "OSPREY_CLAIMS_ROOT": str(models.folder().parent.parent)}
        outcome = stages.run(task, scratch, environment)
        return outcome, (scratch / "log").read_text(errors="replace")

    def answers(self) -> ArtifactRef:
        """Publish the demonstration's answers, as regenerate would."""
        config = RegenerateConfig(
            target=Pinned(uri=f"pvc://models/{models.NAME}"), prompts=(), held_out=HeldOut(samples=0, seed=0),
            max_tokens=_MAX_TOKENS, temperature=0.0, seed=0, engine=Engine(version="none"),
        )  # fmt: skip
        task = self._task(config, {})
        folder = self.folder / "answers"
        folder.mkdir()
        lines = [
            {"domain": each.domain, "prompt_ids": each.prompt_ids.tolist(), "answer_ids": each.answer_ids.tolist()}
            for each in dialogues()
        ]
        (folder / "answers-00000.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        tokens = sum(len(line["answer_ids"]) for line in lines)
        result = RegenerateResult(
            prompts=len(lines), answer_tokens=tokens, cut_at_limit=0, skipped=0, tokens_per_second=0.0
        )
        prefix = task.prefix.removeprefix(f"{task.storage.uri}/")
        made = manifest.publish(open_store(task.storage), prefix, "bench", folder, task=task, result=result)
        return ArtifactRef(uri=task.prefix, digest=made.digest)

    def _task(
        self, config: StageConfig, inputs: Mapping[InputRole, ArtifactRef], *, name: str = "", every: int = 500
    ) -> StageTask:
        return StageTask(
            fingerprint=stage_fingerprint(config, dict(inputs)),
            namespace=name or "bench",
            resource="ospreydrafter/bench",
            storage=_location(self.server),
            config=config,
            inputs=dict(inputs),
            execution=Execution(checkpoint_every_steps=every),
        )


def _artifact(outcome: Outcome) -> ArtifactRef:
    if outcome.artifact is None:
        raise SystemExit("a stage made nothing")
    return outcome.artifact


def _location(server: S3Server) -> StorageLocation:
    return StorageLocation(uri=f"s3://{BUCKET}/osprey", endpoint=server.endpoint, region=REGION)


def _store(server: S3Server) -> Store:
    return open_store(_location(server))


def _keys(server: S3Server) -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}


def _plain(server: S3Server) -> Any:
    """Return boto3's own client, as anybody would make it."""
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name=REGION,
        config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
    )
