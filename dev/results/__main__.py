"""`make results`: measure what is missing of the paper's claims, and write down all of it.

Every cell is found again in the cache, so any number of runs go on where the last one ended, however it ended.
"""

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError

from dev.results import budget, data, schedule
from dev.results.bench import Bench, MissingError
from dev.results.cells import Plan
from dev.results.experiments import EXPERIMENTS
from dev.results.finding import Experiment
from dev.results.lab import FailedError, Lab, NotMadeError
from dev.results.recipe import TRIAL, WHOLE
from dev.results.report import PICTURES, Part, Report
from dev.results.specs import TARGETS, Judged, Target, Wanted
from dev.settings import REPOSITORY, cache_home
from osprey_api.stages import DataToResolve, ResolveResult

REPORT = REPOSITORY / "build" / "results.json"
PAGE = REPOSITORY / "docs" / "results.md"


def main(words: Sequence[str]) -> int:
    """Run, and return the exit status: not zero where a cell failed."""
    parser = argparse.ArgumentParser(prog="python -m dev.results", description=__doc__)
    parser.add_argument("--full", action="store_true", help="all cells and seeds")
    parser.add_argument(
        "--only", type=numbers_of, default=(), help="numbers of experiments, such as 1,4; no page, a file of its own"
    )
    parser.add_argument("--trial", action="store_true", help="everything tiny, in a folder of its own; no page")
    parser.add_argument("--plan", action="store_true", help="print the cells and what they should take")
    asked = parser.parse_args(words)
    experiments = [each for each in EXPERIMENTS if not asked.only or each.number in asked.only]
    recipe = TRIAL if asked.trial else WHOLE
    lab = Lab(cache_home() / ("results-trial" if asked.trial else "results"), recipe)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stopped by either signal, as by Ctrl-C
    try:
        with lab.alone():
            wanted = figures(experiments, full=asked.full)
            targets = used(wanted)
            pins, failed = prepare(lab, targets)
            bench = Bench()
            possible = [figure for figure in wanted if target_of(figure) in pins]
            plan = Plan.of(possible, lab, bench, pins, TARGETS[0])
            if asked.plan:
                sys.stdout.write(planned(plan))
                return 0
            say(f"{len(plan.cells)} cells; from nothing about {schedule.estimate(plan.cells) / 60:.0f} minutes")
            ended = schedule.run(plan.cells, say)
            ended.failed |= failed
            if not asked.full:
                ended.failed |= find(experiments, lab, bench, pins)
    except FailedError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("stopped; the next run goes on from here")
        return 130
    report = Report(
        parts=[part(experiment, bench) for experiment in experiments],
        recipe=recipe,
        ended=ended,
        left=[] if asked.full else left(experiments, bench),
        machine=machine(),
        seconds=bench.costs(),
    )
    where = REPORT.with_stem("results-trial" if asked.trial else "results-only" if asked.only else "results")
    where.parent.mkdir(parents=True, exist_ok=True)
    where.write_text(report.json(), encoding="utf-8")
    if not asked.trial and not asked.only:
        PAGE.write_text(report.markdown(), encoding="utf-8")
        report.write_pictures(PAGE.parent / PICTURES)
    sys.stdout.write(report.markdown())
    for line in report.left:
        say(f"left to FULL=1: {line}")
    for name, why in ended.failed.items():
        say(f"FAILED {name}: {why}")
    for name, lost in ended.skipped.items():
        say(f"skipped {name}, which needs {lost}")
    return 1 if ended.failed else 0


def numbers_of(words: str) -> tuple[int, ...]:
    """Read numbers of experiments.

    Raises:
        argparse.ArgumentTypeError: there is none of such a number.
    """
    known = {str(each.number): each.number for each in EXPERIMENTS}
    wanted = words.split(",")
    if unknown := [each for each in wanted if each not in known]:
        raise argparse.ArgumentTypeError(f"no experiment {', '.join(unknown)!r}: write some of {','.join(known)}")
    return tuple(known[each] for each in wanted)


def figures(experiments: Sequence[Experiment], *, full: bool) -> list[Wanted]:
    """Return all figures that are wanted, each once."""
    return list(dict.fromkeys(figure for each in experiments for figure in each.wanted(full=full)))


def find(
    experiments: Sequence[Experiment], lab: Lab, bench: Bench, pins: Mapping[Target, ResolveResult]
) -> dict[str, str]:
    """Put on the bench what only a full run measures, as far as one has been before.

    Returns:
        Cells that failed in another way than by not having been made.
    """
    more = [figure for figure in figures(experiments, full=True) if figure not in bench and target_of(figure) in pins]
    ended = schedule.run(Plan.of(more, replace(lab, finds_only=True), bench, pins, TARGETS[0]).cells, lambda _: None)
    return {name: why for name, why in ended.failed.items() if not why.startswith(NotMadeError.__name__)}


def left(experiments: Sequence[Experiment], bench: Bench) -> list[str]:
    """Return in words what only a full run measures, and none has."""
    now = set(figures(experiments, full=False))
    lines: list[str] = []
    for experiment in experiments:
        more = [figure for figure in experiment.wanted(full=True) if figure not in now and figure not in bench]
        names = dict.fromkeys(name_of(figure) for figure in more)
        if names:
            lines.append(f"experiment {experiment.number}: {', '.join(names)}")
    return lines


def name_of(figure: Wanted) -> str:
    """Return a figure's drafter or load, in words."""
    if isinstance(figure, Judged):
        return figure.drafter.name
    return f"{figure.drafter.name if figure.drafter else 'the target alone'} at batch {figure.batch}"


def target_of(figure: Wanted) -> Target:
    """Return a figure's target."""
    return figure.drafter.target if figure.drafter else TARGETS[0]


def used(wanted: Sequence[Wanted]) -> list[Target]:
    """Return the targets of some figures; the first is always there, since backbones are cut from it."""
    return [target for target in TARGETS if target is TARGETS[0] or any(target_of(each) is target for each in wanted)]


def prepare(lab: Lab, targets: Sequence[Target]) -> tuple[dict[Target, ResolveResult], dict[str, str]]:
    """Write prompts and text, make models and data claims, and pin them.

    Returns:
        What was found of each target, and why there is nothing of the others. The first must be there.

    Raises:
        FailedError: there is nothing of the first.
    """
    data.write(lab.claims / "data", lab.recipe)
    text = DataToResolve(name=data.TEXT, uri=f"pvc://data/{data.TEXT}.jsonl", kind="Text", field="text")
    link = lab.claims / "models"
    link.unlink(missing_ok=True)
    link.symlink_to(cache_home() / "models")

    def pinned(target: Target) -> ResolveResult | str:
        try:
            return lab.resolve(target.ensure(), [text, *data.to_resolve(target.name)])
        except (FailedError, OSError, SystemExit, CalledProcessError) as error:
            return str(error)

    with ThreadPoolExecutor(len(targets)) as pool:
        found = dict(zip(targets, pool.map(pinned, targets), strict=True))
    pins = {target: each for target, each in found.items() if isinstance(each, ResolveResult)}
    failed = {f"target/{target.name}": each for target, each in found.items() if isinstance(each, str)}
    if targets[0] not in pins:
        raise FailedError(f"{targets[0].title}: {failed[f'target/{targets[0].name}']}")
    return pins, failed


def part(experiment: Experiment, bench: Bench) -> Part:
    """Return what an experiment found."""
    try:
        return Part(experiment, experiment.found(bench))
    except MissingError as error:
        return Part(experiment, None, str(error))


def planned(plan: Plan) -> str:
    """Return the cells with what they should take."""
    lines = [
        f"{cell.price.seconds:6.0f} s  {name}{'  (alone)' if cell.alone else ''}" for name, cell in plan.cells.items()
    ]
    total = sum(cell.price.seconds * (2 if cell.alone else 1) for cell in plan.cells.values())
    lines.append(
        f"{len(lines)} cells, {total:.0f} core-seconds; two at a time {schedule.estimate(plan.cells) / 60:.0f} of "
        f"{budget.LIMIT_SECONDS / 60:.0f} minutes"
    )
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Return the processor in words."""
    facts = dict(
        line.partition(":")[::2]
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        if ":" in line
    )
    named = {key.strip(): value.strip() for key, value in facts.items()}
    units = [unit for unit in ("avx2", "avx512f", "amx_tile") if unit in named.get("flags", "").split()]
    return f"{os.cpu_count()} cores of {named.get('model name', 'an unknown processor')} ({', '.join(units)})"


def say(line: str) -> None:
    """Tell a person what is done."""
    sys.stderr.write(f"== {line}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
