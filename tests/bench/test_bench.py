"""The harness of `make bench-training`: what it makes of its measurements, without measuring much."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dev.bench import __main__ as command
from dev.bench import measure
from dev.bench.against import TOLERANCE, gradient_difference, summarise
from dev.bench.growth import Point, growth
from dev.bench.inputs import Case, Inputs, Kind, Sample
from dev.bench.machine import Machine
from dev.bench.measure import Spread
from dev.bench.pipeline import (
    INTERVAL,
    Distillation,
    Pipeline,
    Regeneration,
    Storage,
    Tokenization,
    cost_of,
    distillation,
    full_share,
)
from dev.bench.report import Report, replaced, summary
from dev.bench.specforge import DECAY, SpecForge
from dev.bench.worker import Osprey, Task
from osprey_trainer.models.draft import Drafter
from osprey_trainer.models.target import TargetStates
from osprey_trainer.teacher_head import TeacherHead
from osprey_trainer.training import COST_LINE
from osprey_trainer.vocabulary import choose_draft_vocabulary

MACHINE = Machine("A Processor", 2, ("avx2",), 24.0, 2, "2.14")
CASE = Case(500, 200, Kind.DEMO)
CONFIG = {
    "model_type": "llama", "vocab_size": CASE.vocabulary, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "rope_theta": 10000.0, "dtype": "float32",
}  # fmt: skip
SPECFORGE = os.environ.get("SPECFORGE")  # noqa: TID251 - a checkout that whoever tests may bring


def run(seconds, *, peak_mib=100, loss=2.0):
    facts = {"tokens": 1000, "rows": [5, 4], "dialogues": 2, "answer_tokens": 7, "flops": 10**12, "gemm_peak": 10**12}
    return {
        "seconds": seconds,
        "cpu_seconds": seconds,
        "peak_bytes": peak_mib << 20,
        "losses": [loss / 2, loss / 2],
        "facts": facts,
    }


@pytest.fixture
def row():
    runs = {
        "osprey": [run([2.0, 3.0], peak_mib=30), run([1.0], peak_mib=50), run([2.5], peak_mib=40)],
        "specforge": [run([5.0, 4.5]), run([4.0])],
    }
    return replace(summarise(CASE, runs, 1e-7), specforge_commit="0123456789ab-dirty")


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    head = TeacherHead(normal(CASE.vocabulary, 64) * 0.3)
    drafter = Drafter.from_scratch(target_config=CONFIG, target_embedding=head.weight, tapped_layers=(2, 4, 5), seed=0)
    counts = torch.randint(9, (CASE.vocabulary,), generator=generator)
    drafter = drafter.with_draft_vocabulary(
        choose_draft_vocabulary(counts, CASE.draft_vocabulary, num_tokens=CASE.vocabulary)
    )
    samples = []
    for length, prompt in ((30, 9), (23, 5), (27, 20)):
        last = normal(length, 64)
        samples.append(
            Sample(
                ids=torch.randint(CASE.vocabulary, (length,), generator=generator),
                answer=torch.arange(length) >= prompt,
                states=TargetStates(normal(length, 3 * 64), last),
                greedy=head.logits(last).argmax(-1),
            )
        )
    return Inputs(samples, head, drafter)


def test_ratios_are_of_medians(row):
    assert row.osprey.seconds == Spread(2.25, 1.0, 3.0)
    assert row.speed_ratio == 2.0
    assert row.memory_ratio == 0.4
    assert row.loss_difference == 0
    assert row.osprey.tokens_per_second.high == 1000
    assert row.osprey.mfu == pytest.approx(1 / 2.25)


def test_the_tensor_that_differs_most_tells_the_difference_of_the_gradients(tmp_path):
    from safetensors.torch import save_file  # noqa: PLC0415

    a = {"x": torch.ones(4), "y": torch.full((4,), 2.0)}
    save_file(a, tmp_path / "a")
    save_file({"x": torch.ones(4), "y": torch.full((4,), 2.5)}, tmp_path / "b")
    save_file({"x": torch.ones(4)}, tmp_path / "c")
    assert gradient_difference(tmp_path / "a", tmp_path / "b") == pytest.approx(0.2)
    with pytest.raises(SystemExit, match=r"different tensors: \['y'\]"):
        gradient_difference(tmp_path / "a", tmp_path / "c")


def test_a_peak_is_above_what_was_there_before():
    held = torch.ones(64 << 18)  # 64 MiB

    def step():
        return torch.ones(32 << 18).sum()

    peak = measure.peak_bytes(step)
    assert 31 << 20 < peak < 48 << 20  # something else may have been freed
    assert held.sum() == held.numel()


def test_a_task_survives_its_way_to_another_process():
    task = Task(CASE, specforge="somewhere", gradients="file", counts=True)
    assert Task.read(json.dumps(asdict(task))) == task


def test_a_measurement_that_fails_says_why():
    with pytest.raises(SystemExit, match=r"ended with 2:\n(.|\n)*No such file"):
        measure.in_process("json.tool", {"not": "a file"})


@pytest.mark.parametrize(("vocabulary", "draft_vocabulary"), [(40, 40), (40, 30), (100, 60), (130, 130)])
def test_a_step_can_have_another_vocabulary_than_the_target(vocabulary, draft_vocabulary, tmp_path, monkeypatch):
    length, hidden, known = 12, 64, 100
    generator = torch.Generator().manual_seed(0)
    states = {
        "head": torch.randn(known, hidden, generator=generator),
        "tapped_layers": torch.tensor([2, 4, 5]),
        "counts": torch.arange(known),
        "ids.0": known - 1 - torch.arange(length),
        "answer.0": torch.arange(length) >= 1,
        "taps.0": torch.randn(length, 3 * hidden, generator=generator),
        "last_hidden.0": torch.randn(length, hidden, generator=generator),
    }
    save_file(states, tmp_path / "states")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr("dev.bench.inputs._states_file", lambda _: tmp_path / "states")
    monkeypatch.setattr("dev.models.folder", lambda: tmp_path)
    case = Case(vocabulary, draft_vocabulary, Kind.ALL, tokens=length)
    step = Osprey(case, Inputs.load(case))
    assert len(step.rows()) == case.steps
    assert step.step()[0] > 0


def test_our_step_is_repeatable_and_has_its_rows(inputs):
    step = Osprey(CASE, inputs)
    assert step.step() == step.step()
    assert len(step.rows()) == CASE.steps
    assert {"fc.weight", "lm_head.weight", "midlayer.self_attn.q_proj.weight"} <= step.gradients().keys()


@pytest.mark.skipif(not SPECFORGE, reason="SPECFORGE names no checkout of SpecForge")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("compact_teacher", [False, True])
def test_specforge_has_the_same_losses_and_gradients(inputs, tmp_path, compact_teacher):
    from safetensors.torch import save_file  # noqa: PLC0415

    ours, theirs = (
        Osprey(CASE, inputs),
        SpecForge(Path(SPECFORGE), CASE, inputs, compact_teacher=compact_teacher, eager=True),
    )
    assert sum(theirs.step()) == pytest.approx(sum(ours.step()), rel=TOLERANCE)
    for name, side in (("ours", ours), ("theirs", theirs)):
        save_file({key: value.contiguous() for key, value in side.gradients().items()}, tmp_path / name)
    assert gradient_difference(tmp_path / "ours", tmp_path / "theirs") < TOLERANCE
    assert 0 < DECAY < 1


def points(name, sizes, mib):
    other = {"tokens": 1024, "vocabulary": 32768}
    return [
        Point(**(other | {name: size}), seconds=Spread.of([1.0]), peak_mib=Spread.of([peak]), logits_mib=128.0)
        for size, peak in zip(sizes, mib, strict=True)
    ]


@pytest.fixture
def curves():
    lengths, vocabularies = (
        points("tokens", (512, 8192), (100.0, 130.0)),
        points("vocabulary", (32768, 262144), (100.0, 800.0)),
    )
    return growth(lengths, vocabularies, replace(vocabularies[-1], tokens=2048, peak_mib=Spread.of([804.0])))


def test_growth_is_the_slope_from_end_to_end(curves):
    assert curves.floats_per_token == 30 * 2**20 / 4 / 7680
    assert curves.floats_per_vocabulary_entry == 700 * 2**20 / 4 / 229376
    assert curves.floats_per_token_at_most == 4 * 2**20 / 4 / 1024


def test_the_time_at_full_concurrency():
    # Two at a time from 0 to 4 but for 2 to 3, when the last one begins.
    assert full_share([(0, 2), (0, 4), (3, 5)], 2) == pytest.approx(2 / 3)
    assert full_share([(0, 2), (0, 4), (2, 5)], 2) == 1.0
    assert full_share([(0, 1)], 2) == 1.0


def test_what_a_checkpoint_costs():
    plain = {"seconds": 100.0, "seconds_of_steps": 90.0, "waiting": 0.01}
    found = distillation([plain], [plain | {"seconds": 104.0}], steps=60, checkpoints=2)
    assert found.seconds_a_checkpoint == 2.0
    assert found.checkpoint_share == pytest.approx(2.0 / (1.5 * INTERVAL))


def test_the_cost_is_found_in_a_log():
    assert cost_of(f'a\n2026 INFO {COST_LINE}{{"tokens": 3}}\nb') == {"tokens": 3}
    with pytest.raises(ValueError, match="does not say"):
        cost_of("nothing")


def test_a_section_is_replaced_or_added():
    page = replaced("# Page\n", "one", "first")
    page = replaced(page, "two", "second")
    again = replaced(page, "one", r"other \1")
    assert again == page.replace("first", r"other \1")
    assert again.startswith("# Page\n")


def test_a_report_keeps_what_was_not_measured_again(tmp_path, row, curves):
    spread = Spread.of([1.0])
    around = Pipeline(
        Tokenization(spread, spread, 1.0),
        Storage(1, spread, spread, 1.0, spread, spread, 1.0),
        Distillation(spread, spread, 1.0, 0.01, {"tokens": 10, "seconds": 1.0, "TFLOP": 1.0, "MFU": 0.5}),
        Regeneration(16, 48, 0.99, 100.0),
    )
    file, page = tmp_path / "training.json", tmp_path / "performance.md"
    for report in (
        Report(MACHINE, [row], None, around, {"growth": "not asked for"}),
        Report(MACHINE, None, curves, None, {"specforge": "no checkout"}),
    ):
        report.write(file)
        report.write_docs(page)
    found = json.loads(file.read_text())
    (entry,) = found["against_specforge"]
    wanted = {"vocabulary": 500, "draft_vocabulary": 200, "batch": "demo", "speed_ratio": 2.0, "memory_ratio": 0.4}
    assert entry.items() >= wanted.items()
    assert found["growth"]["floats_per_token"] == curves.floats_per_token
    assert found["skipped"] == {}
    assert found["machines"].keys() == {"against_specforge", "growth", "pipeline"}
    text = page.read_text()
    assert all(title in text for title in ("## Against SpecForge", "## Growth", "## Around the step"))
    assert "**2.00**" in text
    assert "SpecForge (here at 0123456789ab-dirty)" in text
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", ".svg", ".svg"]
    assert "speed 2.00" in summary(row)


def test_without_a_checkout_that_part_is_skipped_and_says_so():
    report = command.measured(["specforge"], specforge=None, repeats=1)
    assert report.against_specforge is None
    assert "SPECFORGE=CHECKOUT" in report.skipped["specforge"]
    with pytest.raises(SystemExit, match="no checkout of SpecForge"):
        command.measured(["specforge"], specforge=Path("/nowhere"), repeats=1)
