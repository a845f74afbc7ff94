"""However the work is spread, the loss curve is that of plain torch in one process."""

import importlib
import multiprocessing
from pathlib import Path

import pytest
import torch

from dev.network import free_ports

TOLERANCE = 1e-4
"""Of the loss of each of the first 50 steps."""
RESUMED_TOLERANCE = 1e-5
"""Of the loss of each step after a resumption on another number of ranks."""
NEVER = 0
ALL = [pytest.param(world_size, marks=pytest.mark.long if world_size > 2 else ()) for world_size in (1, 2, 4)]


@pytest.fixture
def curves(monkeypatch):
    """The module that the ranks run."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.bfloat16)  # put back what is changed here
    module = importlib.import_module("curves_worker")
    module.exact_muon()
    return module


@pytest.fixture
def models(curves, osprey, source_folder, target_folder, tmp_path):
    osprey(2).save(tmp_path / "drafter")
    return curves.Models(source_folder, tmp_path / "drafter", target_folder)


@pytest.fixture
def spread(curves, models, tmp_path):
    """Trains cases on so many ranks, and returns what each saw: steps, losses, weights."""

    def spread(world_size, cases, *, stop_at=NEVER):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["osprey_trainer.loop"])  # imports once for all processes
        (port,) = free_ports(1)
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        told = {"port": port, "models": models, "out": out, "cases": cases, "stop_at": stop_at}
        processes = [
            context.Process(target=curves.run, args=(rank, world_size), kwargs=told, daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * world_size
        seen = [torch.load(out / f"{number}.pt") for number in range(len(cases))]
        return [(*map(list, zip(*run["lines"], strict=True)), run["weights"]) for run in seen]

    return spread


def plain(curves, models, case):
    """Losses and norms of the gradient by the definition: the whole global batch at once, and torch alone."""
    model, batches = curves.make(
        curves.Case(case.objective, train_embedding=case.train_embedding), models, rank=0, world_size=1
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    s = case.settings
    by_muon = []
    if s.muon_scale is not None:
        layers = [parameter for parameter in model.model.layers.parameters() if parameter.ndim > 1]
        by_muon = [*layers, *([model.model.fc.weight] if case.objective == "distillation" else [])]
    others = list(set(parameters) - set(by_muon))
    optimizers = [torch.optim.AdamW(others, betas=s.betas, weight_decay=s.weight_decay)]
    if by_muon:
        optimizers += [torch.optim.Muon(by_muon, weight_decay=s.weight_decay, adjust_lr_fn="match_rms_adamw")]
    losses, norms = [], []
    for step in range(s.steps):
        batch = next(batches)
        model.zero_grad()
        loss, _ = model(batch, 1 / model.rows(batch))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, s.clip_norm)))
        for optimizer in optimizers:
            scale = s.muon_scale if isinstance(optimizer, torch.optim.Muon) else 1
            optimizer.param_groups[0]["lr"] = scale * s.learning_rate_at(step)
            optimizer.step()
        losses.append(loss.item())
    return losses, norms


def largest_difference(losses, expected):
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


@pytest.mark.parametrize("world_size", ALL)
@pytest.mark.parametrize("objective", ["pretraining", "distillation"])
def test_loss_curves_equal_that_of_one_process(curves, models, spread, objective, world_size):
    cases = [curves.Case(objective, zero_stage=stage, accumulation=1 + stage % 2) for stage in range(4)]
    expected, norms = plain(curves, models, cases[0])
    # The test means something only where clipping matters, by another factor in each step.
    assert sum(norm > cases[0].clip_norm for norm in norms) > curves.STEPS / 2
    unclipped, _ = plain(curves, models, curves.Case(objective, clip_norm=1e9))
    assert largest_difference(unclipped, expected) > 100 * TOLERANCE

    for case, (steps, losses, _) in zip(cases, spread(world_size, cases), strict=True):
        assert steps == list(range(1, curves.STEPS + 1))
        error = largest_difference(losses, expected)
        print(f"{world_size} ranks, {case}: {error:.2g}")  # noqa: T201 - a figure for the documentation
        assert error < TOLERANCE, case


@pytest.mark.parametrize("world_size", ALL[:2])
@pytest.mark.parametrize("objective", ["pretraining", "distillation"])
def test_with_muon_too(curves, models, spread, objective, world_size):
    case = curves.Case(objective, muon_scale=3.0)
    expected, norms = plain(curves, models, case)
    assert max(norms) > case.clip_norm
    with_adamw, _ = plain(curves, models, curves.Case(objective))
    assert largest_difference(with_adamw, expected) > 1000 * TOLERANCE

    ((_, losses, _),) = spread(world_size, [case])
    error = largest_difference(losses, expected)
    print(f"{world_size} ranks, {case}: {error:.2g}")  # noqa: T201 - a figure for the documentation
    assert error < TOLERANCE


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), pytest.param(2, 4, marks=pytest.mark.long)])
@pytest.mark.parametrize("objective", ["pretraining", "distillation"])
def test_another_number_of_ranks_goes_on_with_the_same_curve(  # noqa: PLR0917 - cases
    curves, models, spread, objective, before, after
):
    stop_at, steps = 6, 14
    # An average of the weights needs whole ones; accumulation follows the number of ranks.
    cases = [curves.Case(objective, zero_stage=stage, steps=steps, ema_decay=0.5) for stage in (0, 1, 2)]
    cases += [curves.Case(objective, zero_stage=3, steps=steps)]
    # No checkpoint holds what is not trained.
    cases += [curves.Case(objective, zero_stage=stage, steps=steps, train_embedding=False) for stage in range(4)]
    muon = curves.Case(objective, steps=steps, muon_scale=3.0)
    cases += [muon]
    # However a case is spread, one of these is its curve.
    whole, frozen = curves.Case(objective, steps=steps), curves.Case(objective, steps=steps, train_embedding=False)
    expected = {
        (case.train_embedding, case.muon_scale): plain(curves, models, case)[0] for case in (whole, frozen, muon)
    }
    assert largest_difference(expected[True, None], expected[False, None]) > 100 * RESUMED_TOLERANCE
    for _, losses, weights in spread(before, cases, stop_at=stop_at):
        assert len(losses) == stop_at
        assert not weights

    averages = []
    for case, (numbers, losses, weights) in zip(cases, spread(after, cases), strict=True):
        assert numbers == list(range(stop_at + 1, steps + 1))
        error = largest_difference(losses, expected[case.train_embedding, case.muon_scale][stop_at:])
        print(f"{before} -> {after} ranks, {case}: {error:.2g}")  # noqa: T201 - a figure for the documentation
        assert error < RESUMED_TOLERANCE, case
        if case.ema_decay:
            averages.append(weights)
    for weights in averages[1:]:
        torch.testing.assert_close(weights, averages[0], atol=1e-4, rtol=1e-3)
