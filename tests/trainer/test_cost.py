"""FLOPs as they are counted, against torch's own counter and by hand."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from osprey_trainer.cost import EVERY, CostMeter, FlopCount, Spent, StepCost, gemm_peak

CPU = torch.device("cpu")


def counted(run):
    with FlopCount() as count:
        run()
    return count.flops


def test_a_layer_forward_and_backward():
    layer = nn.Linear(8, 3, bias=False)
    x = torch.randn(5, 8)
    assert counted(lambda: layer(x).sum().backward()) == 2 * 2 * 5 * 8 * 3  # the input needs no gradient


def test_as_torch_counts():
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 6, 16, requires_grad=True)

    def run():
        hidden = model.linear2(model.linear1(x))
        (hidden @ hidden.transpose(1, 2)).softmax(-1).sum().backward()

    with FlopCounterMode(display=False) as expected:
        run()
    assert counted(run) == expected.get_total_flops() > 0


def test_attention_on_a_cpu_counts():
    q = torch.randn(1, 4, 6, 8, requires_grad=True)
    k, v = torch.randn(2, 1, 2, 6, 8, requires_grad=True)

    def run():
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended.sum().backward()

    once = 2 * 4 * 6 * 6 * 8
    assert counted(run) == pytest.approx((2 + 5) * once, rel=0.2)


def test_the_peak_is_that_of_a_large_product():
    assert gemm_peak(CPU, torch.float32) > 1e9


def test_steps_between_those_that_are_counted_cost_as_much_for_a_token():
    meter = CostMeter(CPU, torch.float32, world_size=2)
    left = torch.ones(4, 4)
    costs = []
    for step in range(EVERY + 1):
        with meter.step():
            for _ in range(step + 1):
                left @ left
        costs.append(meter.cost(tokens=step + 1, seconds=1.0))
    assert [cost.flops for cost in costs] == [2 * 2 * 4**3 * (step + 1) for step in range(EVERY + 1)]
    assert costs[0].mfu == pytest.approx(2 * 4**3 / gemm_peak(CPU, torch.float32))


def test_waiting_is_a_share_of_the_step(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("osprey_trainer.cost.time.monotonic", lambda: clock[0])
    meter = CostMeter(CPU, torch.float32, world_size=1)
    for _ in range(2):  # each step begins anew
        with meter.step():
            for _ in range(2):
                with meter.waiting():
                    clock[0] += 0.5
        assert meter.cost(tokens=1, seconds=4.0).waited_s == 1.0


def test_what_steps_cost_together():
    spent = Spent()
    assert spent.figures == {"tokens": 0, "TFLOP": 0, "MFU": 0, "waiting": 0}
    spent.add(StepCost(tokens=10, flops=1e12, mfu=0.5, seconds=1.0, waited_s=0.0))
    spent.add(StepCost(tokens=20, flops=2e12, mfu=0.25, seconds=3.0, waited_s=1.0))
    assert spent.figures == {"tokens": 30, "TFLOP": 3, "MFU": 1.25 / 4, "waiting": 0.25}
