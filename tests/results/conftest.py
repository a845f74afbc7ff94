"""A bench on which everything that an experiment may want was measured."""

import random

import pytest

from dev.results.bench import Answer, Bench
from dev.results.data import SETS
from dev.results.experiments import EXPERIMENTS
from dev.results.specs import TARGETS, Judged
from osprey_api.stages import (
    ArtifactRef,
    BaselineResult,
    DistilResult,
    EvaluateResult,
    ModelFacts,
    Outcome,
    Pinned,
    PinnedData,
    PretrainResult,
    RegenerateResult,
    ResolveResult,
)

DIGEST = "sha256:" + "0" * 64


@pytest.fixture
def pins():
    """What resolve would find."""
    names = ["text", *dict.fromkeys(source for answers in SETS.values() for source in answers.sources)]
    data = tuple(PinnedData(name=name, source=Pinned(uri=f"pvc://data/{name}", digest=DIGEST)) for name in names)
    facts = ModelFacts(architecture="Llama", layers=30, hidden_size=576, vocab_size=49152, size_bytes=1)
    return {
        target: ResolveResult(model=Pinned(uri=f"pvc://models/{target.name}", digest=DIGEST), facts=facts, data=data)
        for target in TARGETS
    }


@pytest.fixture
def fill():
    """Puts figures on a bench: Osprey's steps are fewer, so it is ahead."""

    def put(figures):
        bench = Bench()
        for figure in figures:
            ahead = figure.drafter is not None and figure.drafter.backbone is not None
            if isinstance(figure, Judged):
                bench.judged[figure] = answers(figure.answers, ahead=ahead)
                bench.drafters[figure.drafter] = outcome(
                    DistilResult(
                        steps=1, supervised_tokens=2, first_loss=3, final_loss=2, simulated_acceptance_length=2
                    ),
                    seconds=40 * figure.drafter.epochs * (1.3 if ahead else 1),
                )
                prompts = 128 // SETS[figure.drafter.domain].part
                bench.answers[figure.drafter.target, figure.drafter.domain] = outcome(
                    RegenerateResult(prompts=prompts, answer_tokens=9, cut_at_limit=0, skipped=0, tokens_per_second=9),
                    seconds=9,
                )
                if ahead:
                    bench.backbones[figure.drafter.backbone] = outcome(
                        PretrainResult(steps=1, tokens=1, first_loss=1, final_loss=1), seconds=10
                    )
            else:
                bench.served[figure] = served(figure)
        return bench

    return put


@pytest.fixture
def everything():
    """All figures of a full run."""
    return list(dict.fromkeys(figure for each in EXPERIMENTS for figure in each.wanted(full=True)))


def answers(name, *, ahead):
    rng = random.Random(name)
    found = []
    for source in SETS[name].sources:
        for _ in range(4):
            steps = rng.randint(30, 60)
            found.append(Answer(source.removeprefix("held-out-"), 96, steps - 5 if ahead else steps))
    return found


def outcome(result, *, seconds):
    return Outcome(artifact=ArtifactRef(uri="file:///x", digest=DIGEST), result=result, seconds=seconds)


def served(figure):
    if figure.drafter is None:
        return BaselineResult(requests=16, tokens_per_second=20 * figure.batch)
    return EvaluateResult(
        requests=16,
        acceptance_length=2,
        acceptance_length_corpus=2,
        acceptance_by_position=(0.5,),
        by_domain=(),
        tokens_per_second=18 * figure.batch,
        baseline_tokens_per_second=20,
        identical_outputs=1,
    )
