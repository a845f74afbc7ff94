"""The loop through DeepSpeed, in this process: a group of one."""

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from osprey_api.conditions import FailureReason
from osprey_trainer.batch import WindowBatch
from osprey_trainer.errors import TrainerError
from osprey_trainer.loop import Stopped, train
from osprey_trainer.models.backbone import Backbone
from osprey_trainer.objectives import Distillation, Objective, Pretraining
from osprey_trainer.settings import LoopSettings, Schedule


class Cycle:
    """Batches in a seeded random order."""

    def __init__(self, batches, seed=0):
        self.batches, self.seed, self.served = batches, seed, 0

    def __next__(self):
        generator = torch.Generator().manual_seed(self.seed + self.served)
        self.served += 1
        return self.batches[int(torch.randint(len(self.batches), (), generator=generator))]

    def state_dict(self):
        return {"served": self.served}

    def load_state_dict(self, state):
        self.served = state["served"]


class Folder:
    """Checkpoints kept in a folder."""

    def __init__(self, root: Path):
        self.root = root

    def latest(self):
        steps = sorted(int(path.name) for path in self.root.iterdir()) if self.root.exists() else []
        return self.root / str(steps[-1]) if steps else None

    def save(self, step, write):
        folder = self.root / str(step)
        folder.mkdir(parents=True)
        write(folder)


class Log:
    """Progress that can do something after a step."""

    def __init__(self, after=None):
        self.losses, self.lines, self.after = [], [], after or {}

    def __call__(self, step, total, loss, tokens_per_second, extra):
        self.losses.append(loss)
        self.lines.append((step, total, tokens_per_second, dict(extra)))
        self.after.get(step, lambda: None)()


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def windows():
    generator = torch.Generator().manual_seed(0)
    return [
        WindowBatch(torch.randint(8, (2, 13), generator=generator), names=(f"w{i}a", f"w{i}b"))
        for i in range(5)
    ]


@pytest.fixture
def pretraining(source_folder):
    def make(**options):
        return Pretraining(Backbone.prune(source_folder, 2), **options)

    return make


def settings(**changes):
    defaults = {"steps": 6, "learning_rate": 1e-2, "bf16": False, "checkpoint_every_steps": 100}
    return LoopSettings(**(defaults | changes))


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_one_step_is_adamw_on_the_clipped_mean_gradient(pretraining, windows, zero_stage, accumulation):
    s = settings(steps=1, accumulation=accumulation, zero_stage=zero_stage, warmup_ratio=0)
    result = train(pretraining(), Cycle(windows), s, progress=Log())

    expected = pretraining()
    source = Cycle(windows)
    hidden, labels = [], []
    for batch in (next(source) for _ in range(accumulation)):
        hidden.append(expected.backbone(batch.ids[:, :-1]).flatten(0, 1))
        labels.append(batch.ids[:, 1:].flatten())
    logits = torch.cat(hidden) @ expected.backbone.head_weight.T
    loss = nn.functional.cross_entropy(logits, torch.cat(labels))
    loss.backward()
    nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
    torch.optim.AdamW(expected.parameters(), lr=1e-2, betas=s.betas, weight_decay=0.0).step()

    assert result.loss == pytest.approx(float(loss), rel=1e-5)
    assert result.tokens == 24 * accumulation
    assert result.metrics["cross_entropy"] == pytest.approx(float(loss), rel=1e-5)
    for name, value in expected.backbone.state_dict().items():
        torch.testing.assert_close(result.weights[name], value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "options", [{"zero_stage": 0}, {"zero_stage": 1, "ema_decay": 0.9, "accumulation": 2}, {"zero_stage": 3}]
)
def test_resumed_training_ends_in_the_same_bits(pretraining, windows, tmp_path, options):
    straight = train(pretraining(), Cycle(windows), settings(**options), progress=Log())

    checkpoints = Folder(tmp_path)
    with pytest.raises(Stopped) as stopped:
        train(
            pretraining(),
            Cycle(windows),
            settings(**options),
            progress=Log(after={4: terminate}),
            checkpoints=checkpoints,
        )
    assert (stopped.value.code, stopped.value.step) == (143, 4)
    torch.manual_seed(99)
    log = Log()
    resumed = train(
        pretraining(), Cycle(windows), settings(**options), progress=log, checkpoints=checkpoints
    )

    assert [line[0] for line in log.lines] == [5, 6]
    assert resumed.tokens == straight.tokens
    assert resumed.weights.keys() == straight.weights.keys()
    for name, value in straight.weights.items():
        assert torch.equal(resumed.weights[name], value), name
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
