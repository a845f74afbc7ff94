"""A storage that is away costs as long as it is away; what does not pass by itself ends the stage with its reason."""

import os
import subprocess
import threading
import time
from contextlib import suppress

import pytest

from dev.cluster.cluster import Cluster
from dev.gate import Gate, Phase
from dev.services import REGION, S3Server
from dev.settings import state_home
from osprey_api.conditions import FailureReason
from osprey_api.stages import Execution, StorageLocation

pytestmark = pytest.mark.long

AWAY_S = 120
SLACK_S = 60
"""To start SeaweedFS again, and for a request that waits to be repeated."""
MIB = 1 << 20


@pytest.fixture
def server(own_name):
    """An S3 server of this test's own, with a bucket `drafters`; it can be stopped and started."""
    name = own_name("outage")
    try:
        with S3Server(state_home() / name) as server:
            yield server
    finally:
        Cluster(name).down()  # its folder too


@pytest.fixture
def place(machine_of, server, tmp_path, monkeypatch):
    """Makes a machine whose storage is on the server."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def make(endpoint=server.endpoint):
        import boto3  # noqa: PLC0415 - it takes a while

        client = boto3.session.Session(server.access_key, server.secret_key).client(
            "s3", endpoint_url=server.endpoint, region_name=REGION
        )
        client.create_bucket(Bucket="drafters")
        return machine_of(tmp_path, StorageLocation(uri="s3://drafters/tests", endpoint=endpoint, region=REGION))

    return make


def pretraining(machine, *, steps, every=5, **options):
    pruned = machine.done(machine.prune()).artifact
    tokens = machine.done(machine.tokenize()).artifact
    execution = Execution(checkpoint_every_steps=every)
    return machine.pretrain(pruned, tokens, steps=steps, execution=execution, **options)


@pytest.mark.parametrize("moment", ["while it trains", "when it is done"])
def test_two_minutes_without_s3_cost_two_minutes(place, server, running, moment, capsys):
    """One attempt, whether a checkpoint has to wait or the result."""
    machine = place()
    every, steps = (5, 300) if moment == "while it trains" else (1000, 300)
    with running(machine, pretraining(machine, steps=steps, every=every, seed=1)) as run:
        code, _, _ = run.end()
        assert code == 0
        usual_s = run.seconds
    task = pretraining(machine, steps=steps, every=every, seed=2)
    with running(machine, task) as run:
        run.at_step(20)
        server.stop()
        time.sleep(AWAY_S)
        server.start()
        code, outcome, log = run.end()
    assert (code, outcome.failure) == (0, None), log[-2000:]
    assert not outcome.reused
    with capsys.disabled():
        print(f"\n{moment}: {usual_s:.0f} s, with {AWAY_S} s without S3 {run.seconds:.0f} s")  # noqa: T201 - the record
    assert ("tried again in" in log) or ("is tried again" in log)
    assert run.seconds < usual_s + AWAY_S + SLACK_S


def test_two_minutes_without_s3_as_it_begins_again_cost_two_minutes(place, server, running, capsys):
    """One attempt: the storage is gone when it looks for its newest checkpoint."""
    with Gate(server.endpoint) as gate:
        machine = place(gate.endpoint)
        task = pretraining(machine, steps=300)
        with running(machine, task) as run:
            run.at_step(20)
            run.process.terminate()
            code, outcome, log = run.end()
        assert outcome.failure is FailureReason.STOPPED, log[-2000:]
        looks, is_gone = threading.Event(), threading.Event()

        def guard(request, phase):
            if phase is Phase.BEFORE and "checkpoints" in request.path + request.query:
                looks.set()
                is_gone.wait()

        gate.guard = guard
        with running(machine, task, scratch="another") as run:
            while not looks.wait(1):
                assert run.process.poll() is None, run.said[-2000:]
            server.stop()
            is_gone.set()
            time.sleep(AWAY_S)
            server.start()
            code, outcome, log = run.end()
    assert (code, outcome.failure) == (0, None), log[-2000:]
    assert "tried again in" in log
    assert "goes on from the checkpoint of step" in log
    with capsys.disabled():
        print(f"\nas it begins again: with {AWAY_S} s without S3 {run.seconds:.0f} s")  # noqa: T201 - the record


def test_a_bucket_above_its_quota_ends_it_and_with_more_room_it_goes_on(place, server, running):
    """SeaweedFS says no more than that it can't write."""
    machine = place()
    task = pretraining(machine, steps=2000, every=400)
    with running(machine, task, OSPREY_STORAGE_PATIENCE_SECONDS="20") as run:
        run.at_step(401)
        while not machine.checkpoints(task):
            time.sleep(0.1)
        quota = "s3.bucket.quota -name=drafters -op=set -sizeMB=1"
        # Its master hears only from time to time how much a bucket holds.
        end = time.monotonic() + 120
        while "to read only" not in server.administer(quota, "s3.bucket.quota.enforce -apply"):
            assert time.monotonic() < end
            time.sleep(1)
        code, outcome, log = run.end()
    assert (code, outcome.failure) == (75, FailureReason.STORAGE_UNAVAILABLE), log[-2000:]
    assert "look for a full disk or quota" in outcome.message
    kept = machine.checkpoints(task)
    server.administer("s3.bucket.quota -name=drafters -op=remove", "s3.bucket.quota.enforce -apply")
    with running(machine, task, scratch="another") as run:
        code, outcome, log = run.end()
    assert (code, outcome.failure) == (0, None), log[-2000:]
    assert f"goes on from the checkpoint of step {int(kept[-1].split('-')[1])}" in log


def test_keys_that_are_taken_away_while_it_trains_end_it(place, server, running):
    machine = place()
    with running(machine, pretraining(machine, steps=3000)) as run:
        run.at_step(20)
        server.stop()
        server.secret_key = "another"
        server.start()
        code, outcome, log = run.end()
    assert (code, outcome.failure) == (64, FailureReason.STORAGE_ACCESS_DENIED), log[-2000:]
    assert "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the Secret" in outcome.message


def fill(disk):
    """To the last page, whatever else is written meanwhile."""
    with (disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while ballast.write(b"x" * 4096):
            pass


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
def test_a_disk_that_is_full_ends_it(place, running):
    machine = place()
    task = pretraining(machine, steps=3000, every=20)
    disk = machine.root / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={64 * MIB}", "osprey-test", disk], check=True)
    try:
        with running(machine, task, scratch="small/scratch") as run:
            run.at_step(25)
            fill(disk)
            code, outcome, log = run.end()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert (code, outcome.failure) == (75, FailureReason.OUT_OF_DISK), log[-2000:]
    assert "mount a larger" in outcome.message
    assert machine.checkpoints(task)
