"""``make bench-training``: what the training core costs. Writes build/bench/training.json and docs/performance.md."""

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dev.bench import against, growth, pipeline
from dev.bench.inputs import BUILD, Case, Kind
from dev.bench.machine import Machine
from dev.bench.report import Report, summary
from dev.settings import REPOSITORY

RESULT = BUILD / "training.json"
TRIAL = BUILD / "trial.json"
"""Of a run with fewer cases or repeats, or with options of SpecForge: it says nothing of the goals."""
PAGE = REPOSITORY / "docs" / "performance.md"
EXIT_STOPPED = 143
REPEATS = 3
PARTS = ("specforge", "growth", "pipeline")
OPTIONS = {
    "eager": "does not compile what it marks for torch.compile",
    "compact_teacher": "reads its teacher over the draft vocabulary alone",
}
NO_CHECKOUT = (
    "no checkout of SpecForge was given: SPECFORGE=CHECKOUT make bench-training, after "
    "git clone https://github.com/sgl-project/SpecForge CHECKOUT"
)


def main(words: Sequence[str]) -> None:
    """Measure, and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m dev.bench", description=__doc__)
    parser.add_argument("--specforge", type=Path, help="checkout of SpecForge; without it that part is skipped")
    sizes = sorted({case.vocabulary for case in against.CASES})
    parser.add_argument("--vocabulary", type=int, nargs="+", choices=sizes, help="beside SpecForge, only these sizes")
    parser.add_argument("--batch", choices=list(Kind), nargs="+", help="beside SpecForge, only these batches")
    for option, what in OPTIONS.items():
        parser.add_argument(f"--{option.replace('_', '-')}", action="store_true", help=f"SpecForge {what}")
    parser.add_argument("--repeats", type=int, choices=range(1, 10), default=REPEATS, help="processes for each figure")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="parts to measure")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/performance.md as it is")
    asked = parser.parse_args(words)
    options = {option: getattr(asked, option) for option in OPTIONS}
    cases = [
        case
        for case in against.CASES
        if (not asked.vocabulary or case.vocabulary in asked.vocabulary)
        and (not asked.batch or case.batch in asked.batch)
        and (not asked.compact_teacher or case.draft_vocabulary < case.vocabulary)
    ]
    if not cases:
        parser.error("no case is left: --compact-teacher needs a draft vocabulary")
    if list(asked.only) == ["specforge"] and asked.specforge is None:
        parser.error(NO_CHECKOUT)
    whole = cases == against.CASES and not any(options.values()) and asked.repeats >= REPEATS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_STOPPED))  # what was started is taken down
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > cores / 4:
        say(f"this machine is busy (load {load:.1f} on {cores} cores): the times will say little")
    for part in asked.only:  # each is written when it is there: all of them take more than an hour
        report = measured([part], specforge=asked.specforge, repeats=asked.repeats, cases=cases, options=options)
        report.write(RESULT if whole else TRIAL)
        if whole and not asked.no_docs:
            report.write_docs(PAGE)
        for skipped, why in report.skipped.items():
            say(f"skipped {skipped}: {why}")
    say(f"all figures are in {RESULT if whole else TRIAL}")


def measured(
    parts: Sequence[str],
    *,
    specforge: Path | None,
    repeats: int,
    cases: Sequence[Case] = tuple(against.CASES),
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Measure the parts that can be. The last four are those of `against.compare`.

    Raises:
        SystemExit: the folder is no checkout of SpecForge.
    """
    skipped = {}
    rows = curves = around = None
    if "specforge" in parts and specforge is None:
        skipped["specforge"] = NO_CHECKOUT
    elif "specforge" in parts and specforge is not None:
        if not (specforge / "specforge" / "algorithms" / "eagle3" / "model.py").is_file():
            raise SystemExit(f"{specforge} is no checkout of SpecForge that has its EAGLE-3 model where it was")
        say("our step beside SpecForge's")
        rows = []
        for row in against.compare(specforge.resolve(), repeats=repeats, cases=cases, options=options):
            say(summary(row))
            rows.append(row)
    if "growth" in parts:
        say("growth over length and vocabulary")
        curves = growth.measured(repeats=repeats)
    if "pipeline" in parts:
        say("what lies around the step")
        around = pipeline.measured(repeats=repeats)
    return Report(Machine.this(), rows, curves, around, skipped)


def say(line: str) -> None:
    """Tell a person what is done."""
    sys.stderr.write(f"== {line}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
