"""The sidecar of a real server with a drafter: what is wanted, on the disk and in the server become the same."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from osprey_api.serving import ServerFiles
from osprey_api.stages import Pinned
from osprey_serving.__main__ import main
from osprey_serving.sync import StateServer, Sync

pytestmark = pytest.mark.timeout(600)


def generate(url, prompt):
    """Output ids and verify steps."""
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}}
    answer = httpx.post(f"{url}/generate", json=body, timeout=120).raise_for_status().json()
    return answer["output_ids"], answer["meta_info"]["spec_verify_ct"]


def read_folder(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def deployment(world, drafting, drafter_artifact, tmp_path, monkeypatch):
    """A serving pod's volumes after `fetch`, and its sidecar."""
    first, second, other_kind = (
        drafter_artifact(world.storage, read_folder(folder))
        for folder in (world.drafter, world.worse, world.other_kind)
    )
    wanted, drafter = tmp_path / "wanted.json", tmp_path / "drafter"

    def want(artifact):
        files = ServerFiles(storage=world.storage, target=Pinned(uri="pvc://models/target"), drafter=artifact)
        unfinished = wanted.with_suffix(".new")
        unfinished.write_text(files.model_dump_json())
        unfinished.rename(wanted)  # as the kubelet does: at once

    want(first)
    monkeypatch.setenv("OSPREY_CLAIMS_ROOT", str(world.claims))
    monkeypatch.delenv("OSPREY_WANTED", raising=False)
    assert main(["fetch", "--wanted", str(wanted), "--model", str(tmp_path / "model"), "--drafter", str(drafter)]) == 0
    made = []

    def sidecar(key):
        made.append(Sync(drafting.url, key, wanted, drafter))
        return made[-1]

    sidecar.want, sidecar.wanted, sidecar.drafter = want, wanted, drafter
    sidecar.first, sidecar.second, sidecar.other_kind = first, second, other_kind
    yield sidecar
    for sync in made:
        sync.close()


def test_a_drafter_is_swapped_under_load_and_back(deployment, drafting, admin_key):
    prompts = [[0, 10, 20 + i, 30] for i in range(6)]
    before = [generate(drafting.url, prompt) for prompt in prompts]
    sync = deployment(admin_key)
    assert sync.step(), sync.state.error
    assert (sync.state.ready, sync.state.loaded, sync.state.swaps) == (True, deployment.first.digest, 0)

    deployment.want(deployment.second)
    enough = threading.Event()

    def load(prompt):
        answers = []
        while not enough.is_set():
            answers.append(generate(drafting.url, prompt)[0])
        return answers

    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(load, prompt) for prompt in prompts[:3]]
        try:
            assert sync.step(), sync.state.error
        finally:
            enough.set()
        # No request was lost, and speculation stayed lossless while the drafter changed.
        for (output, _), client in zip(before, clients, strict=False):
            assert all(answer == output for answer in client.result())
    state = sync.state
    assert (state.ready, state.loaded, state.on_disk, state.swaps) == (
        True,
        deployment.second.digest,
        deployment.second.digest,
        1,
    )
    assert httpx.get(f"{drafting.url}/model_info").json()["weight_version"] == deployment.second.digest
    assert sync.step()  # flushes, now that nothing runs
    swapped = [generate(drafting.url, prompt) for prompt in prompts]
    assert [output for output, _ in swapped] == [output for output, _ in before]
    assert sum(steps for _, steps in swapped) > sum(steps for _, steps in before)

    deployment.want(deployment.first)
    assert sync.step(), sync.state.error
    assert sync.step()
    assert [generate(drafting.url, prompt) for prompt in prompts] == before
    assert sync.state.swaps == 2
    assert [path.name for path in deployment.drafter.iterdir() if path.is_dir() and not path.is_symlink()] == [
        deployment.first.digest.replace(":", "-")
    ]


def test_what_goes_wrong_shows_and_leaves_the_server_as_it_was(deployment, drafting, admin_key):
    prompt = [0, 40, 41, 42]
    before = generate(drafting.url, prompt)
    stranger = deployment("another key")
    assert not stranger.step()
    assert "401" in stranger.state.error
    assert not stranger.state.ready

    sync = deployment(admin_key)
    assert sync.step(), sync.state.error
    deployment.want(deployment.other_kind)  # no live swap between kinds of drafter
    assert not sync.step()
    assert "restart the server" in sync.state.error
    assert (sync.state.on_disk, sync.state.loaded) == (deployment.first.digest, deployment.first.digest)
    assert sync.state.wanted == deployment.other_kind.digest
    assert generate(drafting.url, prompt) == before

    absent = deployment.first.model_copy(
        update={"uri": deployment.first.uri + "-absent", "digest": "sha256:" + "0" * 64}
    )
    deployment.want(absent)
    assert not sync.step()
    assert "no finished artifact" in sync.state.error
    deployment.wanted.write_text("{")
    assert not sync.step()
    assert sync.state.failures == 3
    deployment.want(deployment.first)
    assert sync.step()
    assert (sync.state.ready, sync.state.error) == (True, "")
    assert generate(drafting.url, prompt) == before


def test_a_server_that_a_dead_sidecar_left_paused_goes_on(deployment, drafting, admin_key):
    headers = {"Authorization": f"Bearer {admin_key}"}
    httpx.post(f"{drafting.url}/pause_generation", json={"mode": "in_place"}, headers=headers).raise_for_status()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, drafting.url, [0, 50, 51])
        assert deployment(admin_key).step()
        assert len(answer.result(60)[0]) == 48


def test_the_state_is_served(deployment, admin_key):
    sync = deployment(admin_key)
    with StateServer(sync, 0) as server:
        url = f"http://127.0.0.1:{server.port}"
        assert httpx.get(f"{url}/readyz").status_code == 503
        assert sync.step(), sync.state.error
        ready = httpx.get(f"{url}/readyz")
        assert (ready.status_code, ready.json()["loaded"]) == (200, deployment.first.digest)
        metrics = httpx.get(f"{url}/metrics").text
        for place in ("wanted", "disk", "server"):
            assert f'osprey_sync_drafter{{digest="{deployment.first.digest}",place="{place}"}} 1.0' in metrics
        assert "osprey_sync_ready 1.0" in metrics
        assert httpx.get(f"{url}/else").status_code == 404


def test_the_command_runs_until_it_is_stopped(deployment, drafting, admin_key, free_port):
    env = {**os.environ, "OSPREY_SERVER_URL": drafting.url, "OSPREY_ADMIN_KEY": f"{admin_key}\n"}  # noqa: TID251
    command = [sys.executable, "-m", "osprey_serving", "sync", "--port", str(free_port), "--poll", "0.2"]
    paths = ["--wanted", str(deployment.wanted), "--drafter", str(deployment.drafter)]
    process = subprocess.Popen([*command, *paths], env=env)
    try:
        for _ in range(300):
            try:
                if httpx.get(f"http://127.0.0.1:{free_port}/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                assert process.poll() is None
            threading.Event().wait(0.2)
        else:
            pytest.fail("not ready within a minute")
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_a_server_that_is_not_up_is_waited_for_and_is_no_failure(deployment, free_port, admin_key):
    sync = Sync(f"http://127.0.0.1:{free_port}", admin_key, deployment.wanted, deployment.drafter)
    assert sync.step()
    assert (sync.state.ready, sync.state.failures, sync.state.loaded) == (False, 0, None)
    assert sync.state.on_disk == deployment.first.digest
    assert json.loads(deployment.wanted.read_text())["drafter"]["digest"] == sync.state.wanted
    sync.close()
