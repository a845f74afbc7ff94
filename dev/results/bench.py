"""What was made and measured so far: cells write into it, experiments read it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dev.results.specs import Backbone, Drafter, Judged, Served, Target, Wanted
from osprey_api.stages import BaselineResult, DistilResult, EvaluateResult, Outcome, RegenerateResult


@dataclass(frozen=True)
class Answer:
    """One held-out answer under speculation."""

    domain: str
    tokens: int
    steps: int

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per verification; not a number where none was made."""
        return self.tokens / self.steps if self.steps else float("nan")


class MissingError(LookupError):
    """A figure that was not measured: its cell failed, or was left out."""


@dataclass
class Bench:
    """All results, by what they are of. Cells of two threads write, each its own entries.

    Attributes:
        answers: outcomes of regenerate, by target and set.
        states: outcomes of capture, by target and set.
        tokens: outcome of tokenize.
        backbones: outcomes of pretrain, or of prune.
        drafters: outcomes of distil.
        judged: by drafter, set of answers and length of the chain.
        baselines: outcomes of baseline, by batch.
        served: by drafter, or None, and batch.
    """

    answers: dict[tuple[Target, str], Outcome] = field(default_factory=dict)
    states: dict[tuple[Target, str], Outcome] = field(default_factory=dict)
    tokens: list[Outcome] = field(default_factory=list)
    backbones: dict[Backbone, Outcome] = field(default_factory=dict)
    drafters: dict[Drafter, Outcome] = field(default_factory=dict)
    judged: dict[Judged, Sequence[Answer]] = field(default_factory=dict)
    baselines: dict[int, Outcome] = field(default_factory=dict)
    served: dict[Served, BaselineResult | EvaluateResult] = field(default_factory=dict)

    def __contains__(self, wanted: Wanted) -> bool:
        """Say whether a figure was measured."""
        return wanted in (self.judged if isinstance(wanted, Judged) else self.served)

    def counts(self, wanted: Judged) -> Sequence[Answer]:
        """Return the held-out answers of a drafter.

        Raises:
            MissingError: they were not judged.
        """
        if wanted not in self.judged:
            raise MissingError(f"{wanted.drafter.name} on {wanted.answers}, chains of {wanted.chain}")
        return self.judged[wanted]

    def baseline(self, batch: int) -> BaselineResult:
        """Return the speed of the target alone.

        Raises:
            MissingError: it was not served.
        """
        found = self.served.get(Served(None, batch))
        if not isinstance(found, BaselineResult):
            raise MissingError(f"the target alone at batch {batch}")
        return found

    def evaluation(self, drafter: Drafter, batch: int) -> EvaluateResult:
        """Return what a server with a drafter gave.

        Raises:
            MissingError: it was not served.
        """
        found = self.served.get(Served(drafter, batch))
        if not isinstance(found, EvaluateResult):
            raise MissingError(f"{drafter.name} served at batch {batch}")
        return found

    def prompts(self, target: Target, answers: str) -> int:
        """Return how many prompts of a set were answered.

        Raises:
            MissingError: none was.
        """
        found = self.answers.get((target, answers))
        if found is None or not isinstance(found.result, RegenerateResult):
            raise MissingError(f"answers of {target.name}: {answers}")
        return found.result.prompts

    def training(self, drafter: Drafter) -> DistilResult:
        """Return how a distillation ended.

        Raises:
            MissingError: it was not trained.
        """
        found = self.drafters.get(drafter)
        if found is None or not isinstance(found.result, DistilResult):
            raise MissingError(drafter.name)
        return found.result

    def seconds(self, drafter: Drafter) -> float:
        """Return what a distillation took, with one thread, over all its attempts; not a number: nobody knows.

        Raises:
            MissingError: it was not trained.
        """
        self.training(drafter)
        return self.drafters[drafter].seconds

    def costs(self) -> dict[str, float]:
        """Return what each artifact took when it was made, in seconds."""
        named: dict[str, Outcome] = {
            f"answers/{target.name}/{each}": made for (target, each), made in self.answers.items()
        }
        named |= {f"states/{target.name}-{domain}": made for (target, domain), made in self.states.items()}
        named |= {f"backbone/{backbone.name}": made for backbone, made in self.backbones.items()}
        named |= {f"drafter/{drafter.name}": made for drafter, made in self.drafters.items()}
        return {name: made.seconds for name, made in named.items()}
