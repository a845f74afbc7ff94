"""A drafter across families and tokenizers: `python -m dev.crossing`.

Two blocks of SmolLM2-135M (Llama, 49,152 tokens) draft for Gemma 3 270M (262,144 tokens, sliding windows), through the
real stages and a real SGLang, on one machine and without a cluster. What ran before is found again in
`build/crossing`. Gemma is the base model with a plain template: it goes on with the prompt rather than answers it.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from dev import models, stages, vocabularies
from dev.cpu_kernels import launch
from dev.demo import simulation
from dev.demo.prompts import prompts
from dev.demo.report import table
from dev.demo.text import documents
from dev.settings import REPOSITORY
from osprey_api.stages import (
    ArtifactRef,
    BaselineConfig,
    CaptureConfig,
    ConvertConfig,
    ConvertResult,
    DataToResolve,
    DistilConfig,
    DistilResult,
    Engine,
    EvaluateConfig,
    EvaluateResult,
    HeldOut,
    InputRole,
    Optimization,
    Outcome,
    Pinned,
    PretrainConfig,
    PromptSource,
    PruneConfig,
    RegenerateConfig,
    ResolveConfig,
    ResolveResult,
    Speculation,
    StageConfig,
    StageTask,
    StorageLocation,
    TextSource,
    TokenizeConfig,
    stage_fingerprint,
)
from osprey_runtime import manifest

Result = TypeVar("Result")

FOLDER = REPOSITORY / "build" / "crossing"
REPORT = REPOSITORY / "build" / "crossing.json"
TRAINED = {"maths": 48, "code": 48, "general": 48, "letters": 0}
"""Domains, and the prompts of each that are trained on."""
HELD_OUT = HeldOut(samples=8, seed=0)
"""Of each domain: `letters` is only evaluated."""
DOCUMENTS = 1500
ANSWER_TOKENS = 40
CHAIN = 4
DRAFT_VOCABULARY = 8192
# The share must hold the weights whatever else is in memory; the tokens bound the rest.
MEMORY = ("--mem-fraction-static", "0.9", "--max-total-tokens", "8192")
ENGINE = Engine(version=version("sglang"), server_args=(*launch.SERVER_ARGUMENTS, *MEMORY))
SPECULATION = Speculation(steps=CHAIN, top_k=1, draft_tokens=CHAIN + 1)
CONCURRENCY = 8
START_SECONDS = 900
"""A server has so long to start: others may use the machine."""


def optimization(*, batch: int) -> Optimization:
    """Return the recipe of the demonstration: a short training at a constant rate, averaged."""
    return Optimization(
        learning_rate=1e-3, schedule="Constant", warmup_ratio=0.03, weight_decay=0.0, clip_norm=1.0, ema_decay=0.98,
        global_batch_size=batch, sequence_length=128, precision="FP32", seed=0,
    )  # fmt: skip


@dataclass
class Chain:
    """The stages of one drafter, in a folder.

    Attributes:
        outcomes: of the stages that ran, by name.
    """

    folder: Path
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def storage(self) -> StorageLocation:
        """Where artifacts are."""
        return StorageLocation(uri=f"file://{self.folder / 'storage'}")

    def run(self, config: StageConfig, *, server: str = "", name: str = "", **inputs: str) -> Outcome:
        """Run a stage on what others made, or find what it made before.

        Args:
            config: of the stage.
            server: URL, for a client of one.
            name: the stage's own where it runs once.
            inputs: by role, the stage that made it.
        """
        made = {InputRole(role): self.artifact(stage) for role, stage in inputs.items()}
        task = StageTask(
            fingerprint=stage_fingerprint(config, made),
            namespace="crossing",
            resource="ospreydrafter/crossing",
            storage=self.storage,
            config=config,
            inputs=made,
        )
        name = name or config.stage
        environment = {"OSPREY_CLAIMS_ROOT": str(self.folder / "claims"), "OMP_NUM_THREADS": "1"}
        scratch = self.folder / "scratch" / name
        outcome = stages.run(task, scratch, environment, server=server)
        for each in scratch.iterdir():
            if each.is_dir():  # what was fetched; the log stays
                shutil.rmtree(each)
        say(f"{name}: {outcome.seconds:.0f} s{' (found)' if outcome.reused else ''}")
        self.outcomes[name] = outcome
        return outcome

    def artifact(self, stage: str) -> ArtifactRef:
        """Return what a stage made."""
        found = self.outcomes[stage].artifact
        if found is None:
            raise SystemExit(f"{stage} made nothing")
        return found

    def files(self, stage: str) -> Path:
        """Return the files of a stage's artifact, digests verified."""
        made = self.artifact(stage)
        folder = self.folder / "files" / made.digest.replace(":", "-")
        return folder if folder.exists() else manifest.fetch(self.storage, made, folder)

    @contextmanager
    def server(self, target: Path, *, drafter: Path | None = None) -> Iterator[str]:
        """SGLang with the target, and with a drafter if there is one: its URL."""
        chain = ("--speculative-num-steps", str(CHAIN), "--speculative-num-draft-tokens", str(CHAIN + 1))
        with launch.sglang_server(
            target,
            drafter,
            log=self.folder / ("target.log" if drafter is None else "drafter.log"),
            base_environment=os.environ,  # noqa: TID251 - a command's own
            extra_args=MEMORY if drafter is None else (*MEMORY, *chain),
            timeout_s=START_SECONDS,
        ) as server:
            yield server.url


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        untrained: acceptance length of the converted drafter on the held-out prompts, as the trainer simulates it.
        simulated_steps_equal: share of the requests in which the trained one's simulation equals the server.
    """

    converted: ConvertResult
    distilled: DistilResult
    evaluated: EvaluateResult
    untrained: float
    simulated_steps_equal: float
    seconds: Mapping[str, float]
    peak_memory_gib: Mapping[str, float]

    @property
    def text(self) -> str:
        """For people."""
        rows, served = self.converted, self.evaluated
        domains = [[entry.name, str(entry.requests), f"{entry.acceptance_length:.3f}"] for entry in served.by_domain]
        costs = [[name, f"{took:.0f}", f"{self.peak_memory_gib[name]:.2f}"] for name, took in self.seconds.items()]
        return f"""\
rows copied {rows.rows_copied}, composed {rows.rows_composed}, left {rows.rows_left}
draft vocabulary: {rows.coverage:.4f} of the answers' tokens
acceptance length, held-out prompts, served: {served.acceptance_length:.3f} (all tokens / all verify steps: \
{served.acceptance_length_corpus:.3f})
before the distillation, simulated: {self.untrained:.3f}
requests whose verify steps are as simulated: {self.simulated_steps_equal:.3f} of {served.requests}
outputs equal to those without a drafter: {served.identical_outputs:.3f} of {served.requests}

{table([["domain", "requests", "acceptance length"], *domains])}

{table([["stage", "seconds", "peak GiB"], *costs])}
"""


def main() -> None:
    """Run the chain, and print the report."""
    source, target = models.ensure(), vocabularies.gemma()
    prepare(source.parent)
    chain = Chain(FOLDER)
    evaluated = train_and_evaluate(chain, source.name, target)
    lines = [json.loads(line) for line in (chain.files("evaluate") / "requests.jsonl").read_text().splitlines()]
    trained, untrained = (
        simulation.verify_steps(target, chain.files(stage), lines, steps=CHAIN) for stage in ("distil", "convert")
    )
    report = Report(
        converted=result(chain, "convert", ConvertResult),
        distilled=result(chain, "distil", DistilResult),
        evaluated=evaluated,
        untrained=acceptance_length(lines, untrained),
        simulated_steps_equal=fmean(line["verify_steps"] == steps for line, steps in zip(lines, trained, strict=True)),
        seconds={name: outcome.seconds for name, outcome in chain.outcomes.items()},
        peak_memory_gib={name: outcome.peak_memory_bytes / 2**30 for name, outcome in chain.outcomes.items()},
    )
    words = json.dumps(vars(report), default=lambda found: found.model_dump(mode="json"), indent=1)
    REPORT.write_text(words + "\n")
    sys.stdout.write(report.text + "\n")


def prepare(cache: Path) -> None:
    """Write the data, and make it and the models claims."""
    claims = FOLDER / "claims"
    (claims / "data").mkdir(parents=True, exist_ok=True)
    link = claims / "models"
    link.unlink(missing_ok=True)
    link.symlink_to(cache)
    for domain, count in TRAINED.items():
        rows = prompts(domain, count + HELD_OUT.samples)
        write(claims / "data" / f"{domain}.jsonl", "prompt", rows)
    write(claims / "data" / "text.jsonl", "text", islice(documents(), DOCUMENTS))


def write(path: Path, key: str, texts: Any) -> None:
    """Write JSON Lines."""
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")


def train_and_evaluate(chain: Chain, source: str, target: Path) -> EvaluateResult:
    """Run all stages, in the order in which the operator runs them."""
    text = DataToResolve(name="text", uri="pvc://data/text.jsonl", kind="Text", field="text")
    language_model = resolve(chain, "resolve-source", source, [text])
    asked = [
        DataToResolve(name=name, uri=f"pvc://data/{name}.jsonl", kind="Prompts", field="prompt") for name in TRAINED
    ]
    pinned = resolve(chain, "resolve-target", target.name, asked)
    sources = tuple(prompt_source(entry.name, entry.source) for entry in pinned.data)

    chain.run(PruneConfig(source=language_model.model, layers=2))
    (documents_,) = language_model.data
    chain.run(
        TokenizeConfig(tokenizer=language_model.model, data=(TextSource(source=documents_.source, text_field="text"),))
    )
    chain.run(
        PretrainConfig(steps=150, loss_vocab_size=4096, freeze_embedding=True, optimization=optimization(batch=8)),
        backbone="prune",
        tokens="tokenize",
    )
    measured = {
        "target": pinned.model, "prompts": sources, "held_out": HELD_OUT, "max_tokens": ANSWER_TOKENS, "engine": ENGINE,
    }  # fmt: skip
    with chain.server(target) as url:
        chain.run(RegenerateConfig(**measured, temperature=0, seed=0), server=url)
        chain.run(BaselineConfig(**measured, concurrency=CONCURRENCY), server=url)
    chain.run(
        ConvertConfig(target=pinned.model, draft_vocab_size=DRAFT_VOCABULARY, seed=0),
        answers="regenerate",
        backbone="pretrain",
    )
    chain.run(CaptureConfig(target=pinned.model, sequence_length=128, precision="FP32"), answers="regenerate")
    chain.run(
        DistilConfig(
            target=pinned.model,
            epochs=3,
            unroll=CHAIN,
            decay=0.8,
            freeze_embedding=True,
            teacher="Captured",
            optimization=optimization(batch=4),
        ),
        drafter="convert",
        answers="regenerate",
        states="capture",
    )
    with chain.server(target, drafter=chain.files("distil")) as url:
        chain.run(
            EvaluateConfig(**measured, concurrency=CONCURRENCY, speculation=SPECULATION),
            server=url,
            drafter="distil",
            baseline="baseline",
        )
    return result(chain, "evaluate", EvaluateResult)


def resolve(chain: Chain, name: str, model: str, data: Sequence[DataToResolve]) -> ResolveResult:
    """Pin a model and its data to their content."""
    config = ResolveConfig(model=Pinned(uri=f"pvc://models/{model}"), data=tuple(data), owner_uid=name)
    chain.run(config, name=name)
    return result(chain, name, ResolveResult)


def prompt_source(domain: str, source: Pinned) -> PromptSource:
    """Return a domain's prompts, those for training counted."""
    count = TRAINED[domain]
    return PromptSource(
        name=domain, source=source, prompt_field="prompt", samples=count or None, train=count > 0, evaluate=True
    )


def result(chain: Chain, stage: str, kind: type[Result]) -> Result:
    """Return what a stage found."""
    found = chain.outcomes[stage].result
    if not isinstance(found, kind):
        raise SystemExit(f"{stage} gave {found}")
    return found


def acceptance_length(lines: Sequence[Mapping[str, Any]], verify_steps: Sequence[int]) -> float:
    """Return the mean over requests that had a verify step, as evaluate does."""
    pairs = zip(lines, verify_steps, strict=True)
    return fmean(line["completion_tokens"] / steps for line, steps in pairs if steps)


def say(line: str) -> None:
    """Tell a person what is done."""
    sys.stderr.write(f"== {line}\n")


if __name__ == "__main__":
    main()
