"""What each option of the objective is worth: `python -m dev.ablation` on a demonstration that `make demo KEEP=1` left.

Distil runs once for each option (what ran before is found again), on the demonstration's own initial drafter and
answers, all else as the demonstration has it. Acceptance length is the trainer's simulation on the held-out prompts
with the server's own outputs, in chains as long as the unroll that the demonstration trains; its server drafts one
token more, and its table is of that.
"""

import argparse
import base64
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dev import models, stages
from dev.demo import results, simulation
from dev.demo.report import Ratio, Request, acceptance_ratio, table
from dev.demo.sites import NAMESPACE, Local, variables
from dev.files import write_whole
from dev.kubectl import CommandError
from dev.settings import REPOSITORY
from osprey_api.naming import LABEL_NAME, LABEL_STAGE
from osprey_api.stages import (
    TASK_VARIABLE,
    ArtifactRef,
    CaptureConfig,
    DistilConfig,
    InputRole,
    StageName,
    StageTask,
    stage_fingerprint,
)

REPORT = REPOSITORY / "build" / "ablation.json"
OSPREY = "smollm2-osprey"
AS_IT_IS = "as the demonstration"
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    AS_IT_IS: {},
    "decay 1.0": {"decay": 1.0},
    "loss LKAlpha": {"loss": "LKAlpha"},
    "loss LKLambda": {"loss": "LKLambda"},
    "hardLabelWeight 0.5": {"hard_label_weight": 0.5},
    "hardLabelWeight 1.0": {"hard_label_weight": 1.0},
    "decay 0.6": {"decay": 0.6},
    "stepWeights 1, 1, 0.5, 0.25": {"step_weights": (1.0, 1.0, 0.5, 0.25)},
    "unroll 1": {"unroll": 1},
    "unroll 2": {"unroll": 2},
    "unroll 6": {"unroll": 6},
    "freezeEmbedding false": {"freeze_embedding": False},
    "epochs 1": {"epochs": 1},
    "epochs 4": {"epochs": 4},
    "learningRate 0.0001": {"optimization": {"learning_rate": 1e-4}},
    "learningRate 0.0003": {"optimization": {"learning_rate": 3e-4}},
    "learningRate 0.003": {"optimization": {"learning_rate": 3e-3}},
    "schedule Cosine": {"optimization": {"schedule": "Cosine"}},
    "warmupRatio 0.3": {"optimization": {"warmup_ratio": 0.3}},
    "weightDecay 0.1": {"optimization": {"weight_decay": 0.1}},
    "clipNorm 0.1": {"optimization": {"clip_norm": 0.1}},
    "emaDecay unset": {"optimization": {"ema_decay": None}},
    "emaDecay 0.995": {"optimization": {"ema_decay": 0.995}},
    "globalBatchSize 16": {"optimization": {"global_batch_size": 16}},
    "globalBatchSize 2": {"optimization": {"global_batch_size": 2}},
    "seed 1": {"optimization": {"seed": 1}},
}
"""Fields of the stage's config in place of the demonstration's."""


@dataclass(frozen=True)
class Row:
    """One option: mean over requests, and its ratio to the demonstration's own recipe."""

    option: str
    acceptance_length: float
    ratio: Ratio
    by_domain: Mapping[str, float]


@dataclass(frozen=True)
class Experiment:
    """The demonstration's distillation, to be run again with something changed.

    Attributes:
        task: of the distillation.
        held_out: what the server answered to the held-out prompts.
        target: folder of the target.
        environment: of the stages: keys of the storage, threads, claims.
        scratch: folder for downloads.
    """

    task: StageTask
    held_out: Sequence[Mapping[str, Any]]
    target: Path
    environment: Mapping[str, str]
    scratch: Path

    @property
    def config(self) -> DistilConfig:
        """Of the distillation."""
        return DistilConfig.model_validate(self.task.config)

    def captured(self) -> "Experiment":
        """The same on captured states, which are computed where the demonstration did without."""
        if InputRole.STATES in self.task.inputs:
            return self
        say("captures the target's states, once")
        config = CaptureConfig(
            target=self.config.target,
            sequence_length=self.config.optimization.sequence_length,
            precision=self.config.optimization.precision,
        )
        answers = {InputRole.ANSWERS: self.task.inputs[InputRole.ANSWERS]}
        states = run_stage(asked(self.task, config, answers), self.scratch / "capture", self.environment)
        task = self.task.model_copy(
            update={
                "config": self.config.model_copy(update={"teacher": "Captured"}),
                "inputs": {**self.task.inputs, InputRole.STATES: states},
            }
        )
        return replace(self, task=task)

    def run(self, option: str) -> list[Request]:
        """Distil with an option, and count the verify steps of every held-out request."""
        changes = dict(OPTIONS[option])
        changes["optimization"] = self.config.optimization.model_copy(update=changes.get("optimization", {}))
        config = self.config.model_copy(update=changes)
        folder = self.scratch / f"run-{list(OPTIONS).index(option)}"
        drafter = run_stage(asked(self.task, config, self.task.inputs), folder, self.environment)
        where = results.fetch(drafter, self.task.storage, self.scratch)
        steps = simulation.verify_steps(self.target, where, self.held_out, steps=self.config.unroll)
        found = [
            Request(
                domain=line["domain"],
                prompt_ids=tuple(line["prompt_ids"]),
                completion_tokens=line["completion_tokens"],
                verify_steps=count,
            )
            for line, count in zip(self.held_out, steps, strict=True)
        ]
        say(f"{option}: {mean(found):.3f}")
        return found

    def attempt(self, option: str) -> list[Request] | None:
        """Run an option; None where the stage failed, as one that diverges."""
        try:
            return self.run(option)
        except SystemExit as error:
            say(f"{option} FAILED: {error}")
            return None


def main(words: Sequence[str]) -> None:
    """Run every option, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m dev.ablation", description=__doc__)
    parser.add_argument(
        "--jobs",
        type=int,
        choices=range(1, 65),
        default=1,
        metavar="N",
        help="distillations at a time, one thread each",
    )
    parser.add_argument("--only", nargs="+", default=list(OPTIONS), choices=OPTIONS, help="options, by their names")
    wanted = parser.parse_args(words)
    options = list(dict.fromkeys([AS_IT_IS, *wanted.only]))  # what the others are compared with, always
    kubectl = Local().kubectl
    selector = f"{LABEL_NAME}={OSPREY},{LABEL_STAGE}={StageName.DISTIL}"
    try:
        resource = kubectl.read("ospreydrafter", OSPREY, "-n", NAMESPACE)
        (job,) = kubectl.read("jobs", "-n", NAMESPACE, "-l", selector)["items"]
    except (CommandError, ValueError) as error:
        raise SystemExit(f"there is no finished demonstration: run `make demo KEEP=1` first ({error})") from error
    stage = next(entry for entry in job["spec"]["template"]["spec"]["containers"] if entry["name"] == "stage")
    told = {entry["name"]: entry.get("value", "") for entry in stage["env"]}
    task = StageTask.model_validate_json(told[TASK_VARIABLE])
    secret = kubectl.read("secret", stage["envFrom"][0]["secretRef"]["name"], "-n", NAMESPACE)["data"]
    keys = {name: base64.b64decode(value).decode() for name, value in secret.items()}
    target = models.ensure()
    with tempfile.TemporaryDirectory() as folder, variables(keys):
        experiment = Experiment(
            task=task,
            held_out=results.read_evaluation(resource, task.storage, Path(folder)).lines,
            target=target,
            environment=keys | {"OSPREY_CLAIMS_ROOT": str(target.parent.parent), "OMP_NUM_THREADS": "1"},
            scratch=Path(folder),
        ).captured()
        with ThreadPoolExecutor(wanted.jobs) as pool:
            found = dict(zip(options, pool.map(experiment.attempt, options), strict=True))
    plain = found[AS_IT_IS]
    if plain is None:
        raise SystemExit("there is nothing to compare with: the demonstration's own recipe failed")
    rows = [row(option, counted, plain) for option, counted in found.items() if counted]
    write_whole(REPORT, json.dumps([asdict(entry) for entry in rows], indent=2) + "\n")
    sys.stdout.write(text_of(rows) + "\n")
    if failed := [option for option, counted in found.items() if counted is None]:
        raise SystemExit(f"failed: {', '.join(failed)}")


def asked(task: StageTask, config: CaptureConfig | DistilConfig, inputs: Mapping[InputRole, ArtifactRef]) -> StageTask:
    """A task beside another one."""
    fingerprint = stage_fingerprint(config, dict(inputs))
    return task.model_copy(update={"config": config, "inputs": dict(inputs), "fingerprint": fingerprint})


def run_stage(task: StageTask, scratch: Path, environment: Mapping[str, str]) -> ArtifactRef:
    """Run a stage and return what it made."""
    artifact = stages.run(task, scratch, environment).artifact
    if artifact is None:
        raise SystemExit(f"{task.stage} made nothing")
    return artifact


def row(option: str, ours: Sequence[Request], plain: Sequence[Request]) -> Row:
    """Compare an option with the plain recipe, request by request."""
    domains = dict.fromkeys(request.domain for request in ours)
    return Row(
        option,
        mean(ours),
        acceptance_ratio(ours, plain),
        {domain: mean([request for request in ours if request.domain == domain]) for domain in domains},
    )


def mean(requests: Sequence[Request]) -> float:
    """Return the mean over requests that had a verify step."""
    lengths = [request.acceptance_length for request in requests if request.verify_steps]
    return sum(lengths) / len(lengths)


def text_of(rows: Sequence[Row]) -> str:
    """Return the rows as a table."""
    head = ["option", "acceptance length", "ratio", "95 % interval", *rows[0].by_domain]
    lines = [
        [
            entry.option,
            f"{entry.acceptance_length:.3f}",
            f"{entry.ratio.value:.3f}",
            f"{entry.ratio.low:.3f} to {entry.ratio.high:.3f}",
            *(f"{value:.3f}" for value in entry.by_domain.values()),
        ]
        for entry in rows
    ]
    return table([head, *lines])


def say(line: str) -> None:
    """Tell a person what is done."""
    sys.stderr.write(f"== {line}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
