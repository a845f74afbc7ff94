"""From the figures that are wanted to the cells that make them.

A cell is one thing to do, with one thread: it runs stages, which find again what they made before, and puts what came
of it on the bench.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dev.results.bench import Answer, Bench
from dev.results.budget import Kind, Price
from dev.results.data import HELD_OUT, NONE_HELD_OUT, OTHER_LANGUAGES, SETS, TEXT, prompt_source
from dev.results.lab import ENGINE, FailedError, Lab, NotMadeError, artifact, result, write_json
from dev.results.languages import LANGUAGES
from dev.results.specs import FOCUS, Backbone, Drafter, Judged, Options, Served, Target, Wanted
from osprey_api.fingerprint import sha256
from osprey_api.stages import (
    ArtifactRef,
    BaselineConfig,
    BaselineResult,
    CaptureConfig,
    ConvertConfig,
    DistilConfig,
    EvaluateConfig,
    EvaluateResult,
    InputRole,
    Optimization,
    Outcome,
    PretrainConfig,
    PruneConfig,
    RegenerateConfig,
    ResolveResult,
    Speculation,
    TextSource,
    TokenizeConfig,
)

LOSS_VOCABULARY = 4096
"""Tokens that Stage 2 predicts: the whole head would take most of the time on a CPU."""
CHAIN = 5
"""Of servers."""
JUDGE = "dev.results.judge"
JUDGE_VERSION = 1
"""Raise it when the simulation gives other counts for the same inputs."""

Config = TypeVar("Config", PretrainConfig, ConvertConfig, DistilConfig)


@dataclass(frozen=True)
class Cell:
    """One thing to do.

    Attributes:
        name: unique; also the folder of its logs.
        price: what it is expected to take.
        needs: names of cells that must be done.
        work: does it.
        alone: it measures time: nothing may run beside it.
    """

    name: str
    price: Price
    work: Callable[[], None]
    needs: tuple[str, ...] = ()
    alone: bool = False


@dataclass
class Plan:
    """Cells by name, each behind those that it needs.

    Attributes:
        pins: what resolve found, by target.
        unanswered: why a set of answers is not there.
    """

    lab: Lab
    bench: Bench
    pins: Mapping[Target, ResolveResult]
    source: Target
    cells: dict[str, Cell] = field(default_factory=dict)
    unanswered: dict[tuple[Target, str], str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, wanted: Iterable[Wanted], lab: Lab, bench: Bench, pins: Mapping[Target, ResolveResult], source: Target
    ) -> "Plan":
        """Return the cells for some figures.

        Args:
            wanted: the figures.
            source: what backbones are cut from.
        """
        plan = cls(lab, bench, pins, source)
        figures = list(dict.fromkeys(wanted))
        judged: dict[tuple[Drafter, str], list[Judged]] = {}
        batches: dict[Drafter | None, list[int]] = {}
        for figure in figures:
            if isinstance(figure, Judged):
                judged.setdefault((figure.drafter, figure.answers), []).append(figure)
            else:
                batches.setdefault(figure.drafter, []).append(figure.batch)
        sets: dict[Target, dict[str, None]] = {}
        for drafter, answers in judged:
            sets.setdefault(drafter.target, {}).update({drafter.domain: None, answers: None})
        for served in batches:
            if served:
                sets.setdefault(served.target, {})[served.domain] = None
        for target, names in sets.items():
            plan._answers(target, [name for name in SETS if name in names])
        for (drafter, answers), wished in judged.items():
            plan._judge(drafter, answers, wished)
        if batches:
            plan._serve_alone(sorted({batch for loads in batches.values() for batch in loads}))
            for served, loads in batches.items():
                if served:
                    plan._serve(served, sorted(loads))
        return plan

    def _add(self, cell: Cell) -> str:
        self.cells.setdefault(cell.name, cell)
        return cell.name

    # ------------------------------------------------------------------------------------- backbones

    def _backbone(self, backbone: Backbone) -> str:
        recipe = self.lab.recipe
        name = f"backbone/{backbone.name}"
        if name in self.cells:
            return name
        if backbone.steps == 0:
            return self._add(Cell(name, Price(Kind.PRUNE), lambda: self._prune(name, backbone)))
        pruned, tokens = self._backbone(Backbone(backbone.blocks, 0)), self._tokens()
        config = changed(
            PretrainConfig(
                steps=recipe.stage2_steps(backbone.steps),
                loss_vocab_size=LOSS_VOCABULARY,
                freeze_embedding=True,
                optimization=recipe.pretraining,
            ),
            backbone.options,
        )

        def work() -> None:
            inputs = {
                InputRole.BACKBONE: artifact(self.bench.backbones[Backbone(backbone.blocks, 0)]),
                InputRole.TOKENS: artifact(self.bench.tokens[0]),
            }
            self.bench.backbones[backbone] = self.lab.run(name, config, inputs)

        price = Price(Kind.PRETRAIN, config.steps, backbone.blocks)
        return self._add(Cell(name, price, work, (pruned, tokens)))

    def _prune(self, name: str, backbone: Backbone) -> None:
        config = PruneConfig(source=self.pins[self.source].model, layers=backbone.blocks)
        self.bench.backbones[backbone] = self.lab.run(name, config, {})

    def _tokens(self) -> str:
        pinned = self.pins[self.source]
        (text,) = (entry.source for entry in pinned.data if entry.name == TEXT)
        config = TokenizeConfig(tokenizer=pinned.model, data=(TextSource(source=text, text_field="text"),))

        def work() -> None:
            self.bench.tokens.append(self.lab.run("tokens", config, {}))

        return self._add(Cell("tokens", Price(Kind.TOKENIZE), work))

    # --------------------------------------------------------------------------------------- answers

    def _answers(self, target: Target, sets: list[str]) -> str:
        """Answer all sets of a target with one server."""
        name = f"answers/{target.name}"
        configs = {each: self.regenerate(target, each) for each in sets}

        def work() -> None:
            missing = []
            for each, config in configs.items():
                found = self.lab.found(config, {})
                if found:
                    self.bench.answers[target, each] = found
                else:
                    missing.append(each)
            if not missing or self.lab.finds_only:  # of the sets that are there, some figures can be had
                return
            with self.lab.server(name, target.ensure()) as url:
                for each in missing:
                    try:
                        self.bench.answers[target, each] = self.lab.run(f"{name}/{each}", configs[each], {}, server=url)
                    except FailedError as error:
                        self.unanswered[target, each] = str(error)  # what needs this set fails, and nothing else

        prompts = sum(self._prompts(target, each) for each in sets)
        price = Price(Kind.ANSWER, prompts * self.lab.recipe.answer_tokens, of=target.name)
        return self._add(Cell(name, price, work))

    def regenerate(self, target: Target, answers: str) -> RegenerateConfig:
        """Return what a target is told to answer a set."""
        recipe, each = self.lab.recipe, SETS[answers]
        pinned = {entry.name: entry.source for entry in self.pins[target].data}
        samples = each.prompts_of(recipe, target) if each.trains else None
        return RegenerateConfig(
            target=self.pins[target].model,
            prompts=tuple(prompt_source(source, pinned[source], samples=samples) for source in each.sources),
            held_out=recipe.held_out_of(target) if each.trains else NONE_HELD_OUT,
            max_tokens=recipe.answer_tokens,
            temperature=each.temperature,
            seed=0,
            engine=ENGINE,
        )

    def _answered(self, target: Target, answers: str) -> ArtifactRef:
        """Return a set of answers.

        Raises:
            FailedError: it was tried in vain.
            NotMadeError: it was not made.
        """
        if (target, answers) in self.unanswered:
            raise FailedError(f"answers of {target.name}, {answers}: {self.unanswered[target, answers]}")
        if (target, answers) not in self.bench.answers:
            raise NotMadeError(f"answers of {target.name}, {answers}")
        return artifact(self.bench.answers[target, answers])

    def _prompts(self, target: Target, answers: str) -> int:
        """Return how many prompts a set has."""
        if answers == OTHER_LANGUAGES:
            return sum(map(len, LANGUAGES.values()))
        recipe, each = self.lab.recipe, SETS[answers]
        if each.trains:
            return each.prompts_of(recipe, target)
        return len(each.sources) * recipe.held_out_of(target).samples

    def _states(self, target: Target, answers: str) -> str:
        """Capture the target's states of a set of answers, for those that learn from it or are judged by it."""
        recipe = self.lab.recipe
        name = f"states/{target.name}-{answers}"
        config = CaptureConfig(target=self.pins[target].model, sequence_length=recipe.sequence_length, precision="FP32")

        def work() -> None:
            inputs = {InputRole.ANSWERS: self._answered(target, answers)}
            self.bench.states[target, answers] = self.lab.run(name, config, inputs)

        price = Price(Kind.CAPTURE, self._prompts(target, answers) * recipe.answer_tokens, of=target.name)
        return self._add(Cell(name, price, work, (f"answers/{target.name}",)))

    # -------------------------------------------------------------------------------------- drafters

    def _drafter(self, drafter: Drafter) -> str:
        recipe, target = self.lab.recipe, drafter.target
        name = f"drafter/{drafter.name}"
        if name in self.cells:
            return name
        needs = [f"answers/{target.name}", self._states(target, drafter.domain)]
        if drafter.backbone:
            needs.append(self._backbone(drafter.backbone))
        of_convert = tuple(option for option in drafter.options if option[0] == "draft_vocab_size")
        convert = changed(
            ConvertConfig(
                target=self.pins[target].model,
                draft_vocab_size=target.draft_vocabulary,
                seed=0 if drafter.backbone else drafter.seed,  # only EAGLE-3 begins with random weights
            ),
            of_convert,
        )
        distil = changed(
            DistilConfig(
                target=self.pins[target].model,
                epochs=drafter.epochs,
                unroll=recipe.unroll,
                decay=0.8,
                freeze_embedding=True,
                teacher="Captured",
                optimization=recipe.distillation(drafter),
            ),
            tuple(option for option in drafter.options if option not in of_convert),
        )

        def work() -> None:
            answers = {InputRole.ANSWERS: self._answered(target, drafter.domain)}
            body = {InputRole.BACKBONE: artifact(self.bench.backbones[drafter.backbone])} if drafter.backbone else {}
            initial = artifact(self.lab.run(name, convert, answers | body))
            states = artifact(self.bench.states[target, drafter.domain])
            inputs = answers | {InputRole.DRAFTER: initial, InputRole.STATES: states}
            self.bench.drafters[drafter] = self.lab.run(name, distil, inputs)

        tokens = self._prompts(target, drafter.domain) * recipe.answer_tokens * drafter.epochs
        blocks = drafter.backbone.blocks if drafter.backbone else 0
        return self._add(Cell(name, Price(Kind.DISTIL, tokens, blocks, target.name), work, tuple(needs)))

    def _judge(self, drafter: Drafter, answers: str, figures: list[Judged]) -> str:
        name = f"judged/{drafter.name}" + (f"/{answers}" if answers != HELD_OUT else "")

        def work() -> None:
            made = artifact(self.bench.drafters[drafter])
            kept = {figure: self._kept(figure, made) for figure in figures}
            missing = [figure for figure, path in kept.items() if not self._read(figure, path)]
            if not missing:
                return
            self.lab.check_running()
            with self.lab.files(name, made) as folder:
                counts = self._judged(name, drafter, answers, folder, [figure.chain for figure in missing])
            for figure in missing:
                write_json(
                    kept[figure],
                    {
                        "drafter": drafter.name,
                        "set": answers,
                        "chain": figure.chain,
                        "answers": counts[str(figure.chain)],
                    },
                )
                self._read(figure, kept[figure])

        steps = sum(figure.chain for figure in figures)
        price = Price(Kind.JUDGE, steps, of=drafter.target.name)
        needs = (self._drafter(drafter), self._states(drafter.target, answers))
        return self._add(Cell(name, price, work, needs))

    def _read(self, figure: Judged, path: Path) -> bool:
        """Put counts on the bench; False where there are none, or what is there was not written whole."""
        try:
            counts = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return False
        self.bench.judged[figure] = [Answer(**each) for each in counts["answers"]]
        return True

    def _kept(self, figure: Judged, made: ArtifactRef) -> Path:
        target = figure.drafter.target
        return self.lab.kept(
            "judged",
            sha256(
                {
                    "version": JUDGE_VERSION,
                    "drafter": made.digest,
                    "answers": self._answered(target, figure.answers).digest,
                    "states": artifact(self.bench.states[target, figure.answers]).digest,
                    "chain": figure.chain,
                }
            ),
        )

    def _judged(self, name: str, drafter: Drafter, answers: str, folder: Path, chains: list[int]) -> dict[str, Any]:
        """Run the simulation, in a process of its own: counts by length of the chain."""
        target = drafter.target
        task = {
            "drafter": str(folder),
            "storage": self.lab.storage.model_dump(mode="json"),
            "sequence_length": self.lab.recipe.sequence_length,
            "answers": str(self.lab.copied(self._answered(target, answers))),
            "states": artifact(self.bench.states[target, answers]).model_dump(mode="json"),
            "chains": chains,
        }
        log = self.lab.scratch(name) / "log"
        with log.open("w") as errors:
            done = subprocess.run(
                [sys.executable, "-m", JUDGE],
                input=json.dumps(task),
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self.lab.whole_environment(name),
                text=True,
                check=False,
            )
        if done.returncode:
            raise FailedError(f"the simulation failed ({done.returncode}), see {log}")
        counts: dict[str, Any] = json.loads(done.stdout)
        return counts

    # --------------------------------------------------------------------------------------- servers

    def _serving(self, target: Target, batch: int) -> dict[str, object]:
        recipe = self.lab.recipe
        pinned = {entry.name: entry.source for entry in self.pins[target].data}
        held_out = recipe.held_out_of(target)
        return {
            "target": self.pins[target].model,
            "prompts": (prompt_source(FOCUS, pinned[FOCUS], samples=None),),
            "held_out": held_out.model_copy(update={"samples": min(recipe.served, held_out.samples)}),
            "max_tokens": recipe.served_tokens,
            "concurrency": batch,
            "engine": ENGINE,
        }

    def _serve_alone(self, batches: list[int]) -> str:
        name = f"served/{self.source.name}"
        configs = {batch: BaselineConfig.model_validate(self._serving(self.source, batch)) for batch in batches}

        def work() -> None:
            def put(batch: int, outcome: Outcome) -> None:
                self.bench.baselines[batch] = outcome
                self.bench.served[Served(None, batch)] = result(outcome, BaselineResult)

            missing = []
            for batch, config in configs.items():
                found = self.lab.found(config, {})
                if found:
                    put(batch, found)
                else:
                    missing.append(batch)
            if missing and not self.lab.finds_only:  # with those that are there, some figures can be had
                with self.lab.server(name, self.source.ensure(), threads=2) as url:
                    for batch in missing:
                        put(batch, self.lab.run(f"{name}/{batch}", configs[batch], {}, server=url))

        return self._add(Cell(name, Price(Kind.SERVE, len(batches)), work, alone=True))

    def _serve(self, drafter: Drafter, batches: list[int]) -> str:
        name = f"served/{drafter.name}"
        target = drafter.target
        configs = {
            batch: EvaluateConfig.model_validate(
                self._serving(target, batch)
                | {"speculation": Speculation(steps=CHAIN, top_k=1, draft_tokens=CHAIN + 1)}
            )
            for batch in batches
        }

        def work() -> None:
            made = artifact(self.bench.drafters[drafter])

            def inputs(batch: int) -> dict[InputRole, ArtifactRef]:
                return {InputRole.DRAFTER: made, InputRole.BASELINE: artifact(self.bench.baselines[batch])}

            def put(batch: int, outcome: Outcome) -> None:
                self.bench.served[Served(drafter, batch)] = result(outcome, EvaluateResult)

            missing = []
            for batch, config in configs.items():
                found = self.lab.found(config, inputs(batch)) if batch in self.bench.baselines else None
                if found:
                    put(batch, found)
                else:
                    missing.append(batch)
            if not missing:
                return
            self.lab.check_running()
            with (
                self.lab.files(name, made) as folder,
                self.lab.server(name, target.ensure(), drafter=folder, chain=CHAIN, threads=2) as url,
            ):
                for batch in missing:
                    put(batch, self.lab.run(f"{name}/{batch}", configs[batch], inputs(batch), server=url))

        needs = (self._drafter(drafter), f"served/{self.source.name}")
        return self._add(Cell(name, Price(Kind.SERVE, len(batches)), work, needs, alone=True))


def changed(config: Config, options: Options) -> Config:
    """Return a config with other values of some fields, its own or its optimization's.

    Raises:
        pydantic.ValidationError: there is no such field, or it takes no such value.
    """
    fields: dict[str, Any] = config.model_dump(by_alias=False)
    for name, value in options:
        of = fields["optimization"] if name in Optimization.model_fields and "optimization" in fields else fields
        of[name] = value
    return type(config).model_validate(fields)
