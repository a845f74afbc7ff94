"""What was measured, as JSON and as sections of docs/performance.md.

A section is what lies between two marks in the page. One whose part was not measured this time stays as it is.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dev.bench.against import Row, Side
from dev.bench.growth import Growth, Point
from dev.bench.machine import Machine
from dev.bench.measure import Spread
from dev.bench.pipeline import INTERVAL, Pipeline
from dev.files import write_whole
from dev.markdown import table
from dev.plots import Line, Plot, svg

TITLE = """# Performance

What the training core costs, as `make bench-training` measures it. Each section is generated and names its machine.
"""
_KEYS = {"specforge": "against_specforge"}
"""Of parts in the JSON, where they are called otherwise."""
PLOTS = ("performance-lengths", "performance-vocabularies")


@dataclass(frozen=True)
class Report:
    """Of a run; None: that part was not measured, and `skipped` says why."""

    machine: Machine
    against_specforge: Sequence[Row] | None
    growth: Growth | None
    pipeline: Pipeline | None
    skipped: Mapping[str, str]

    def write(self, file: Path) -> None:
        """Write all of it, over the parts of an earlier run that this one measured again."""
        earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        new = {
            "against_specforge": None
            if self.against_specforge is None
            else [asdict(row) for row in self.against_specforge],
            "growth": None if self.growth is None else asdict(self.growth),
            "pipeline": None if self.pipeline is None else asdict(self.pipeline),
        }
        machine = asdict(self.machine)
        measured = {name: value for name, value in new.items() if value is not None}
        machines = earlier.get("machines", {}) | dict.fromkeys(measured, machine)
        whole = {**earlier, **measured}
        skipped = {**earlier.get("skipped", {}), **self.skipped}
        lacking = {part: why for part, why in skipped.items() if whole.get(_KEYS.get(part, part)) is None}
        whole |= {"machines": machines, "skipped": lacking}
        write_whole(file, json.dumps(whole, indent=2) + "\n")

    def write_docs(self, page: Path) -> None:
        """Put each part that was measured into its section of the page, and draw its plots beside it."""
        text = page.read_text() if page.exists() else TITLE
        for name, section in self._sections().items():
            text = replaced(text, name, section)
        write_whole(page, text)
        if self.growth is not None:
            for plot in plots(self.growth):
                (page.parent / f"{plot.name}.svg").write_text(svg(plot))

    def _sections(self) -> dict[str, str]:
        sections = {}
        if self.against_specforge is not None:
            sections["specforge"] = against_section(self.against_specforge, self.machine)
        if self.growth is not None:
            sections["growth"] = growth_section(self.growth, self.machine)
        if self.pipeline is not None:
            sections["pipeline"] = pipeline_section(self.pipeline, self.machine)
        return sections


def replaced(text: str, name: str, section: str) -> str:
    """Return a page with this between the marks of a section; one that it lacks is added at its end."""
    begin, end = f"<!-- bench {name}: generated -->", f"<!-- end of {name} -->"
    marked = f"{begin}\n{section.strip()}\n{end}"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if pattern.search(text):
        return pattern.sub(lambda _: marked, text)
    return f"{text.rstrip()}\n\n{marked}\n"


def against_section(rows: Sequence[Row], machine: Machine) -> str:
    """Return the comparison with SpecForge."""
    head = [
        "V", "Vd", "batch", "speed", "memory", "tokens/s", "SpecForge's", "peak MiB", "SpecForge's",
        "TFLOP", "SpecForge's", "MFU", "SpecForge's", "loss", "gradient",
    ]  # fmt: skip
    lines = [
        [
            f"{row.vocabulary:,}",
            "all" if row.draft_vocabulary == row.vocabulary else f"{row.draft_vocabulary:,}",
            row.batch,
            f"**{row.speed_ratio:.2f}**",
            f"**{row.memory_ratio:.2f}**",
            spread(row.osprey.tokens_per_second),
            spread(row.specforge.tokens_per_second),
            spread(row.osprey.peak_mib),
            spread(row.specforge.peak_mib),
            f"{row.osprey.tflop:.2f}",
            f"{row.specforge.tflop:.2f}",
            f"{row.osprey.mfu:.0%}",
            f"{row.specforge.mfu:.0%}",
            f"{row.loss_difference:.0e}",
            f"{row.gradient_difference:.0e}",
        ]
        for row in rows
    ]
    facts = {row.batch: row.facts for row in rows}
    demo = facts.get("demo", {})
    about = (
        f" ({demo['dialogues']} dialogues, {demo['tokens']} tokens, {demo['answer_tokens']} of them answers)"
        if demo
        else ""
    )
    commit = rows[0].specforge_commit
    here = f" (here at {commit})" if commit else ""
    return f"""## Against SpecForge

`SPECFORGE=CHECKOUT make bench-training`, where CHECKOUT is a clone of github.com/sgl-project/SpecForge{here}.
{machine}.

One step: forward and backward of the unroll, K = 5, an EAGLE-3 layer of hidden size 576 in fp32, from token ids, tapped
states, the target's last hidden states and its head. T is the tokens of a step, V the target's vocabulary, Vd the
drafter's, K the steps of the unroll, MFU the share of the machine's peak in matrix products. The target is SmolLM2, of
49,152 tokens; for another V its head has random rows added, or is cut.

`demo` is two batches of the demonstration in one{about},
`all` one sequence of 1024 tokens of which every row is supervised. Speed is our tokens per second by SpecForge's,
memory our peak by SpecForge's, each above the process's memory before the step; medians, with the lowest and the
highest in brackets.
Every measurement is a fresh process, the sides in turn.

{table([head, *lines])}

The last two columns are the relative differences of the loss and of the gradients (norm by norm, of the tensor that
differs most), for the same weights, data, rows and normaliser. SpecForge runs its own training step, strategy, model
and target head, with its `sdpa` attention (not `flex` or `flash`) and its eager loss, since its Triton kernel needs a
GPU. What it marks for torch.compile is compiled, in a step before those that count; the differences are those of a step
that is not compiled, which adds up more exactly.
Its loss mask is replaced by the exact rows of each step, as it would otherwise train some that serving never asks for;
that changes nothing in its cost, since it computes every row either way. Two of its
options can be tried: `.venv/bin/python -m dev.bench --specforge CHECKOUT --only specforge` with `--eager` or
`--compact-teacher`. On a GPU: not measured.
"""


def growth_section(growth: Growth, machine: Machine) -> str:
    """Return the curves."""

    def rows(points: Sequence[Point]) -> list[list[str]]:
        return [
            [
                f"{point.tokens:,}",
                f"{point.vocabulary:,}",
                spread(point.seconds, 2),
                spread(point.peak_mib),
                f"{point.logits_mib:,.0f}",
            ]
            for point in points
        ]

    head = ["T", "V", "seconds", "peak MiB", "MiB of one tensor T x V"]
    return f"""## Growth

`make bench-training`. {machine}.

A step as above, every row supervised, the full vocabulary. Over the lengths, a further token takes
{growth.floats_per_token:,.0f} fp32 numbers; over the vocabularies at one length, a further entry takes
{growth.floats_per_vocabulary_entry:,.0f}. If memory grew with T x V, a further token would take more of a larger
vocabulary: of {growth.at_most.vocabulary:,} entries it takes {growth.floats_per_token_at_most:,.0f}.

{table([head, *rows(growth.lengths)])}

{table([head, *rows([*growth.vocabularies, growth.at_most])])}

![Over the length]({PLOTS[0]}.svg) ![Over the vocabulary]({PLOTS[1]}.svg)
"""


def pipeline_section(pipeline: Pipeline, machine: Machine) -> str:
    """Return what lies around the step, and what a result costs."""
    tokens, storage, distil, server = (
        pipeline.tokenization,
        pipeline.storage,
        pipeline.distillation,
        pipeline.regeneration,
    )
    rows = [
        ["what", "here", "goal", "measured as"],
        ["waiting for data or teacher", f"{distil.waiting.median:.2%} of a step", "< 3 %", "distil, states in S3"],
        [
            f"a checkpoint every {INTERVAL} steps",
            f"{distil.checkpoint_share:.1%} of a step",
            "<= 5 %",
            f"{distil.seconds_a_checkpoint:.2f} s each, steps of {distil.seconds_a_step.median:.2f} s",
        ],
        [
            "tokenization, rows to shards",
            f"{tokens.ratio:.2f} of `encode_batch`",
            ">= 0.8",
            f"{spread(tokens.stage)} and {spread(tokens.encode_batch)} tokens/s",
        ],
        [
            "S3, writing",
            f"{storage.write_ratio:.2f} times boto3",
            "<= 1.3",
            f"{storage.mib} MiB in {spread(storage.write, 2)} s and {spread(storage.plain_write, 2)} s",
        ],
        [
            "S3, reading",
            f"{storage.read_ratio:.2f} times boto3",
            "<= 1.3",
            f"{spread(storage.read, 2)} s and {spread(storage.plain_read, 2)} s",
        ],
        [
            "regenerate, server full",
            f"{server.full:.1%} of the time",
            "",
            f"{server.requests} requests, {server.concurrency} at a time, {server.tokens_per_second:.0f} tokens/s",
        ],
    ]
    cost = distil.cost
    return f"""## Around the step, and what a result costs

`make bench-training`. {machine}. Real parts: stages as their pods run them, SeaweedFS, SGLang on the CPU.

{table(rows)}

Our store computes a SHA-256 of all that it reads, boto3 does not. The time at full concurrency is counted until the
last request was sent.

A run of distil at the demonstration's recipe ({cost["tokens"]:,.0f} supervised tokens, EAGLE-3) took
{cost["seconds"]:.0f} s and {cost["TFLOP"]:.2f} TFLOP, {cost["TFLOP"] / cost["tokens"] * 1e3:.3f} TFLOP for 1000 tokens,
at an MFU of {cost["MFU"]:.0%} against the matrix product of the same machine. The same figures are in every line of a
training stage's log.
"""


def plots(growth: Growth) -> list[Plot]:
    """Return both pictures."""

    def lines(points: Sequence[Point], size: str) -> list[Line]:
        return [
            Line("peak, MiB", [(getattr(point, size), point.peak_mib.median) for point in points]),
            Line("one T x V tensor, MiB", [(getattr(point, size), point.logits_mib) for point in points]),
            Line("step, s", [(getattr(point, size), point.seconds.median) for point in points]),
        ]

    lengths, vocabularies = lines(growth.lengths, "tokens"), lines(growth.vocabularies, "vocabulary")
    return [
        Plot(PLOTS[0], "T, tokens (V = 32k)", "MiB, seconds", lengths, logarithmic=True),
        Plot(PLOTS[1], "V (T = 1k)", "MiB, seconds", vocabularies, logarithmic=True),
    ]


def spread(value: Spread, digits: int = 0) -> str:
    """Return a median with its range."""
    return f"{value.median:,.{digits}f} ({value.low:,.{digits}f}–{value.high:,.{digits}f})"


def summary(row: Row) -> str:
    """Return a row in a line."""

    def side(side: Side) -> str:
        return f"{side.seconds.median:.2f} s, {side.peak_mib.median:.0f} MiB"

    return (
        f"V {row.vocabulary}, Vd {row.draft_vocabulary}, {row.batch}: speed {row.speed_ratio:.2f}, memory "
        f"{row.memory_ratio:.2f} ({side(row.osprey)}; SpecForge {side(row.specforge)}); differences: loss "
        f"{row.loss_difference:.1e}, gradient {row.gradient_difference:.1e}"
    )
