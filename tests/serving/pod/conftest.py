"""A tiny target that chats, servers of it that can be killed and started again, and a pod's stage container."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cpu_kernels_launch as launch  # the module that tests/serving/conftest.py has loaded
import pytest

from osprey_api.conditions import EXIT_CODE_OF
from osprey_api.fingerprint import sha256
from osprey_api.stages import (
    ArtifactRef,
    BaselineConfig,
    ConvertConfig,
    ConvertResult,
    Engine,
    EvaluateConfig,
    HeldOut,
    Outcome,
    Pinned,
    PromptSource,
    RegenerateConfig,
    Speculation,
    StageTask,
    StorageLocation,
    stage_fingerprint,
)
from osprey_runtime import manifest
from osprey_runtime.runner import prefix_of
from osprey_runtime.store import open_store
from osprey_serving.__main__ import main

_MODELS = Path(__file__).parents[1] / "plugin" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("tiny_models", _MODELS)
tiny_models = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tiny_models)
tiny = tiny_models.tiny

ADMIN_KEY = "key-of-the-tests"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}: {% endif %}"
)
TOO_LONG = "long " * 500
"""2500 tokens: the tiny target's context is 2048."""


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def free_port():
    """A port on which nothing listens."""
    return _free_port()


class Sidecar:
    """An SGLang server at one address, as the kubelet keeps it: killed, started again."""

    def __init__(self, model, drafter, log):
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            *(sys.executable, "-m", "sglang.launch_server"),
            *launch.arguments(model, drafter, port=self.port, admin_key=ADMIN_KEY),
        ]
        self._log = log
        self._process = None

    def start(self, *, wait=True):
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env=launch.environment(os.environ),  # noqa: TID251 - the server inherits it
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if wait:
            self.wait()

    def wait(self):
        launch._wait_until_healthy(launch.Server(self.url, self._process, self._log), 240)

    def kill(self):
        """End it at once, with its children."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            launch._stop(self._process)
            self._process = None


@pytest.fixture(scope="session")
def world(tiny, tmp_path_factory):
    """What all pods see: claims with the target and with prompts, and the storage."""
    root = tmp_path_factory.mktemp("world")
    claims = root / "claims"
    target = claims / "models" / "target"
    shutil.copytree(tiny.folder, target)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    (claims / "data").mkdir()
    prompts = {
        "math": [f"what is {i} and {i + 7}" for i in range(24)],
        "code": [f"write function {i}" for i in range(12)],
        "talk": ["hello there", TOO_LONG, "how do you do"],
    }
    for name, texts in prompts.items():
        lines = [json.dumps({"prompt": text}) + "\n" for text in texts]
        (claims / "data" / f"{name}.jsonl").write_text("".join(lines))
    sources = tuple(
        PromptSource(
            name=name,
            source=Pinned(uri=f"pvc://data/{name}.jsonl"),
            prompt_field="prompt",
            samples=None,
            train=name != "code",
            evaluate=name != "talk",
        )
        for name in prompts
    )
    return SimpleNamespace(
        root=root,
        claims=claims,
        target=target,
        model=tiny.model,
        drafter=tiny.drafters["osprey"].folder,
        worse=tiny.drafters["worse"].folder,
        other_kind=tiny.drafters["eagle3"].folder,
        prompts=prompts,
        sources=sources,
        storage=StorageLocation(uri=f"file://{root}/storage"),
    )


@pytest.fixture(scope="session")
def servers(world):
    """A server of the target alone, and one with a drafter; they start at the same time."""
    plain = Sidecar(world.target, None, world.root / "plain.log")
    drafting = Sidecar(world.target, world.drafter, world.root / "drafting.log")
    try:
        plain.start(wait=False)
        drafting.start()
        plain.wait()
        yield plain, drafting
    finally:
        plain.kill()
        drafting.kill()


@pytest.fixture(scope="session")
def plain(servers):
    """The server of the target alone."""
    return servers[0]


@pytest.fixture(scope="session")
def drafting(servers):
    """The server with a drafter."""
    return servers[1]


@pytest.fixture
def admin_key():
    """The servers' admin key."""
    return ADMIN_KEY


@pytest.fixture
def drafter_artifact(tmp_path):
    """Publish files as a finished drafter and return where it is."""

    def publish(storage, files):
        folder = tmp_path / f"made-{sha256(sorted(map(str, files.items())))[:8]}"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        config = ConvertConfig(target=Pinned(uri="pvc://models/target"), draft_vocab_size=None, seed=0)
        task = StageTask(
            fingerprint=folder.name, namespace="team", resource="ospreydrafter/tiny", storage=storage, config=config
        )
        result = ConvertResult(parameters=1, rows_copied=1, rows_composed=0, rows_left=0, coverage=1)
        made = manifest.publish(open_store(storage), prefix_of(task), "a", folder, task=task, result=result)
        return ArtifactRef(uri=task.prefix, digest=made.digest)

    return publish


@pytest.fixture
def configs(world):
    """The three configs, all of the same target and prompts; give what is to be different."""
    common = {
        "target": Pinned(uri="pvc://models/target"),
        "prompts": world.sources,
        "held_out": HeldOut(samples=6, seed=1),
        "max_tokens": 32,
        "engine": Engine(version="0.5.23"),
    }
    return SimpleNamespace(
        regenerate=lambda **more: RegenerateConfig(**{**common, "temperature": 0, "seed": 0, **more}),
        baseline=lambda **more: BaselineConfig(**{**common, "concurrency": 3, **more}),
        evaluate=lambda **more: EvaluateConfig(**{**common, "concurrency": 3, "speculation": Speculation(), **more}),
    )


@pytest.fixture
def pod(world, tmp_path):
    """The environment of a stage's container, and ways to run one."""

    def environment(task, url, **more):
        return {
            "OSPREY_TASK": task.model_dump_json(),
            "OSPREY_ATTEMPT": "a",
            "OSPREY_SERVER_URL": url,
            "OSPREY_ADMIN_KEY": ADMIN_KEY,
            "OSPREY_CLAIMS_ROOT": str(world.claims),
            "OSPREY_SCRATCH": str(tmp_path / "scratch"),
            "OSPREY_TERMINATION_LOG": str(tmp_path / "termination-log"),
            "OSPREY_METRICS_PORT": str(_free_port()),
            "HF_HUB_OFFLINE": "1",
            **more,
        }

    def task(config, inputs=None, **execution):
        return StageTask(
            fingerprint=stage_fingerprint(config, inputs or {}),
            namespace="team",
            resource="ospreydrafter/tiny",
            storage=world.storage,
            config=config,
            inputs=inputs or {},
            execution=execution,
        )

    def run(config, url, *arguments, inputs=None, execution=None, **more):
        """Run a stage in this process and return its outcome."""
        stage = task(config, inputs, **(execution or {}))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment(stage, url, **more).items():
                patch.setenv(name, value)
            code = main([stage.stage, *arguments])
        outcome = Outcome.model_validate_json((tmp_path / "termination-log").read_bytes())
        assert code == (0 if outcome.failure is None else EXIT_CODE_OF[outcome.failure])
        return outcome

    def start(config, url, *arguments, execution=None, **more):
        """Run a stage in a process of its own."""
        stage = task(config, **(execution or {}))
        return subprocess.Popen(
            [sys.executable, "-m", "osprey_serving", stage.stage, *arguments],
            env={**os.environ, **environment(stage, url, **more)},  # noqa: TID251 - the process inherits it
        )

    def files(outcome):
        """Return the folder with an artifact's files."""
        folder = Path(outcome.artifact.uri.removeprefix("file://"))
        manifest = json.loads((folder / "manifest.json").read_bytes())
        return folder / "attempts" / manifest["attempt"] / manifest["digest"].removeprefix("sha256:")[:16]

    return SimpleNamespace(run=run, start=start, files=files)
