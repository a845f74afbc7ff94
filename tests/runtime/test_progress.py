"""Progress as Prometheus reads it, as a terminal shows it, and as a log keeps it."""

import io
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from osprey_api import progress as names
from osprey_runtime.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def scrape(progress: Progress) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{progress.port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_metrics_by_the_contracts_names():
    with Progress("distil", port=0, out=io.StringIO()) as progress:
        assert scrape(progress) == {}  # nothing is known yet, and 0 would be a lie
        progress.begin(total=200, done=100)
        assert scrape(progress) == {names.TOTAL_STEPS: 200, names.STEP: 100}
        progress.update(150, loss=1.25, tokens_per_second=1000.0)
        progress.update(151, simulated_acceptance_length=2.5)
        found = scrape(progress)
        assert 0 < found.pop(names.ETA_SECONDS) < 60
        assert found == {
            names.TOTAL_STEPS: 200,
            names.STEP: 151,
            names.LOSS: 1.25,
            names.TOKENS_PER_SECOND: 1000,
            names.SIMULATED_ACCEPTANCE_LENGTH: 2.5,
        }


def test_further_figures_are_shown_and_not_served():
    out = io.StringIO()
    with Progress("distil", port=0, out=out) as progress:
        progress.update(1, loss=2.0, more={"MFU": 0.25})
        assert scrape(progress) == {names.STEP: 1, names.LOSS: 2}
    assert out.getvalue() == "distil 1, loss 2, MFU 0.25\n"


def test_an_unknown_total_is_not_told():
    out = io.StringIO()
    with Progress("tokenize", port=0, out=out) as progress:
        progress.update(74, tokens_per_second=1000.0)
        assert scrape(progress) == {names.STEP: 74, names.TOKENS_PER_SECOND: 1000}
    assert out.getvalue() == "tokenize 74, tokens/s 1000\n"


def test_time_left_is_judged_by_this_attempts_steps(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("osprey_runtime.progress.time.monotonic", lambda: clock[0])
    out = io.StringIO()
    with Progress("distil", port=None, out=out) as progress:
        progress.begin(total=200, done=100)
        clock[0] += 10
        progress.update(110)  # one second a step, not 0.09
    assert out.getvalue() == "distil 110/200, 90 s left\n"


def test_log_has_a_line_every_15_seconds_and_the_last(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("osprey_runtime.progress.time.monotonic", lambda: clock[0])
    out = io.StringIO()
    with Progress("tokenize", port=None, out=out) as progress:
        progress.begin(total=100)
        for step in range(1, 101):
            clock[0] += 1
            progress.update(step, loss=1.0)
    steps = [int(line.split()[1].split("/")[0]) for line in out.getvalue().splitlines()]
    assert steps == [1, 16, 31, 46, 61, 76, 91, 100]


def test_terminal_has_a_bar():
    out = Terminal()
    with Progress("tokenize", port=None, out=out) as progress:
        progress.begin(total=10, done=5)
        progress.update(10, loss=1.5)
    assert "tokenize: 100%" in out.getvalue()
    assert "10/10" in out.getvalue()


def test_port_that_is_taken_is_a_warning(caplog):
    with Progress(port=0, out=io.StringIO()) as first, Progress(port=first.port, out=io.StringIO()) as second:
        assert second.port is None
        second.begin(1)
        second.update(1)
    assert "progress is not served" in caplog.text


def test_port_is_free_afterwards():
    with Progress(port=0, out=io.StringIO()) as first:
        port = first.port
    with Progress(port=port, out=io.StringIO()) as second:
        assert second.port == port


@pytest.mark.parametrize("port", [None, 0])
def test_closing_twice(port):
    progress = Progress(port=port, out=io.StringIO())
    progress.close()
    progress.close()
