"""``make bench-training``: what the training core costs. Writes build/bench/training.json and docs/performance.md."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dev.bench import against, growth, pipeline
from dev.bench.inputs import BUILD
from dev.bench.machine import Machine
from dev.bench.report import Report, summary
from dev.settings import REPOSITORY

RESULT = BUILD / "training.json"
PAGE = REPOSITORY / "docs" / "performance.md"
PARTS = ("specforge", "growth", "pipeline")
NO_CHECKOUT = (
    "no checkout of SpecForge was given: SPECFORGE=CHECKOUT make bench-training, after "
    "git clone https://github.com/sgl-project/SpecForge CHECKOUT"
)


def main(words: Sequence[str]) -> None:
    """Measure, and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m dev.bench", description=__doc__)
    parser.add_argument("--specforge", type=Path, help="checkout of SpecForge; without it that part is skipped")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each figure")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="parts to measure")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/performance.md as it is")
    asked = parser.parse_args(words)
    report = measured(asked.only, specforge=asked.specforge, repeats=asked.repeats)
    report.write(RESULT)
    if not asked.no_docs:
        report.write_docs(PAGE)
    for row in report.against_specforge or ():
        say(summary(row))
    for part, why in report.skipped.items():
        say(f"skipped {part}: {why}")
    say(f"all figures: {RESULT}")


def measured(parts: Sequence[str], *, specforge: Path | None, repeats: int) -> Report:
    """Measure the parts that can be.

    Raises:
        SystemExit: the folder is no checkout of SpecForge.
    """
    skipped = {part: "not asked for" for part in PARTS if part not in parts}
    rows = curves = around = None
    if "specforge" in parts and specforge is None:
        skipped["specforge"] = NO_CHECKOUT
    elif "specforge" in parts and specforge is not None:
        if not (specforge / "specforge" / "algorithms" / "eagle3" / "model.py").is_file():
            raise SystemExit(f"{specforge} is no checkout of SpecForge that has its EAGLE-3 model where it was")
        say("our step beside SpecForge's")
        rows = against.compare(specforge.resolve(), repeats=repeats)
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
