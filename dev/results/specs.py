"""What is compared: targets, backbones and drafters, each named by what shaped it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dev import models, vocabularies

Options = tuple[tuple[str, object], ...]
"""Fields of a training stage's config, or of its optimization, with values in place of the recipe's."""
DOMAINS = ("maths", "code", "general")
"""Trained and evaluated."""
LETTERS = "letters"
"""Only evaluated."""
FOCUS = "code"
"""The domain of the experiments that train on one alone."""


@dataclass(frozen=True)
class Target:
    """A model whose drafters are trained.

    Attributes:
        name: in file names and tables.
        title: for people.
        ensure: returns its folder.
        share: of the recipe's prompts: a larger target answers fewer.
        draft_vocabulary: tokens that its drafters can draft.
    """

    name: str
    title: str
    ensure: Callable[[], Path]
    share: float
    draft_vocabulary: int


SMOLLM2 = Target("smollm2", "SmolLM2-135M-Instruct", models.ensure, share=1.0, draft_vocabulary=4096)
GEMMA = Target("gemma3", "Gemma 3 270M", vocabularies.gemma, share=0.5, draft_vocabulary=8192)
TARGETS = (SMOLLM2, GEMMA)
"""The first is also what backbones are cut from."""


@dataclass(frozen=True, order=True)
class Backbone:
    """The first blocks of SmolLM2.

    Attributes:
        blocks: decoder blocks kept.
        steps: of Stage 2; 0: pruned and no more.
        options: of Stage 2.
    """

    blocks: int = 2
    steps: int = 600
    options: Options = ()

    @property
    def name(self) -> str:
        """For files and tables."""
        return f"{self.blocks}b-{self.steps}{_suffix(self.options)}"


@dataclass(frozen=True)
class Drafter:
    """One training.

    Attributes:
        domain: of its answers.
        backbone: None: EAGLE-3, from scratch.
        epochs: passes over the answers.
        slower: the learning rate is divided by it.
        seed: of the order, and of an EAGLE-3 drafter's random weights.
        options: of Stages 3 and 4.
    """

    domain: str
    backbone: Backbone | None
    target: Target = SMOLLM2
    epochs: int = 3
    slower: int = 1
    seed: int = 0
    options: Options = ()

    @property
    def name(self) -> str:
        """For files and tables."""
        body = f"osprey-{self.backbone.name}" if self.backbone else "eagle3"
        slower = f"-lr{self.slower}" if self.slower != 1 else ""
        return f"{self.target.name}-{self.domain}-{body}-e{self.epochs}{slower}-s{self.seed}{_suffix(self.options)}"


def _suffix(options: Options) -> str:
    return "".join(f"-{name}={_word(value)}" for name, value in options)


def _word(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Judged:
    """Acceptance of a drafter by the trainer's simulation.

    Attributes:
        answers: the set of held-out answers, see `data`.
        chain: tokens drafted per verification.
    """

    drafter: Drafter
    answers: str = "held-out"
    chain: int = 5


@dataclass(frozen=True)
class Served:
    """A real server under a load.

    Attributes:
        drafter: None: the target alone.
        batch: requests in flight.
    """

    drafter: Drafter | None
    batch: int


Wanted = Judged | Served
"""One figure of a table."""


def osprey(domain: str = FOCUS, *, blocks: int = 2, stage2: int = 600, seed: int = 0) -> Drafter:
    """Return the paper's recipe."""
    return Drafter(domain, Backbone(blocks, stage2), seed=seed)


def eagle3(domain: str = FOCUS, *, epochs: int = 3, seed: int = 0) -> Drafter:
    """Return EAGLE-3 from scratch."""
    return Drafter(domain, None, epochs=epochs, seed=seed)
