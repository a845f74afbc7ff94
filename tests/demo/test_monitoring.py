"""What the demonstration asks of a real Prometheus, and of a page of metrics."""

import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from dev.demo.monitoring import Follow, page, prometheus
from dev.services import Prometheus

NAME = "osprey_drafter_acceptance_length"
MINE = {"namespace": "demo", "name": "mine"}


@pytest.fixture(scope="module")
def exporter():
    """Address of a page with two drafters."""
    registry = CollectorRegistry()
    gauge = Gauge(NAME, "as the operator exports it", ["namespace", "name"], registry=registry)
    gauge.labels("demo", "mine").set(2.5)
    gauge.labels("demo", "other").set(1.5)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module", params=["prometheus", "page"])
def ask(request, exporter, tmp_path_factory):
    if request.param == "page":
        yield page(f"http://{exporter}/metrics")
        return
    job = {"job_name": "operator", "honor_labels": True, "static_configs": [{"targets": [exporter]}]}
    with Prometheus(tmp_path_factory.mktemp("prometheus"), [job], scrape_interval_s=1) as server:
        yield prometheus(server.url)


def test_a_series_is_followed_until_it_has_a_value(ask):
    with Follow(ask, [NAME], MINE, interval_s=0.2) as follow:
        follow.wait(20)
    assert follow.values == {NAME: 2.5}


def test_no_series_is_no_value_and_several_are_an_error(ask):
    assert ask(NAME, {"name": "nobody"}) is None
    with Follow(ask, [NAME], MINE, interval_s=0.2) as follow:
        follow.wait(20)
    with pytest.raises(ValueError, match="2 series"):
        ask(NAME, {"namespace": "demo"})


def test_a_series_that_never_comes_is_named(ask):
    with Follow(ask, ["nothing"], MINE, interval_s=0.2) as follow, pytest.raises(TimeoutError, match="nothing"):
        follow.wait(1)
