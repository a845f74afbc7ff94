import pytest
import torch

from osprey_trainer.training import LossHistory, warn_of_slow_bf16


def history(steps):
    kept = LossHistory(steps)
    for step in range(1, steps + 1):
        kept.add(step, float(step))
    return kept


def test_a_short_run_keeps_every_loss():
    assert history(5).points == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0)]


def test_a_long_run_keeps_means_of_equal_parts():
    points = history(1001).points
    assert len(points) == 167
    assert points[0] == (6, pytest.approx(3.5))
    assert points[-1] == (1001, pytest.approx((997 + 1001) / 2))


@pytest.mark.parametrize("at", [6, 7, 500])
def test_a_history_goes_on_where_it_was_kept(tmp_path, at):
    kept = LossHistory(1001)
    for step in range(1, 1002):
        kept.add(step, float(step))
        if step == at:
            kept.write(tmp_path / "history.json")
            kept = LossHistory.read(tmp_path / "history.json")
    assert kept == history(1001)


@pytest.mark.parametrize(
    ("capabilities", "precision", "muon", "warnings"),
    [
        ({"avx512_bf16": False, "amx_bf16": False}, "BF16", False, ["precision FP32"]),
        ({"avx512_bf16": False, "amx_bf16": False}, "FP32", False, []),
        ({"avx512_bf16": False, "amx_bf16": False}, "FP32", True, ["optimizer AdamW"]),
        ({"avx512_bf16": False, "amx_bf16": False}, "BF16", True, ["precision FP32", "optimizer AdamW"]),
        ({"avx512_bf16": True, "amx_bf16": False}, "BF16", True, []),
        ({"bf16": True}, "BF16", False, []),
    ],
)
def test_bf16_without_units_for_it_is_told(monkeypatch, caplog, capabilities, precision, muon, warnings):  # noqa: PLR0917
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    warn_of_slow_bf16(precision, muon=muon)
    assert len(caplog.messages) == len(warnings)
    assert all(word in message for word, message in zip(warnings, caplog.messages, strict=True))
