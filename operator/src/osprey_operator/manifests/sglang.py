"""The SGLang server and the containers that run before it: the same in a stage's Job and in a Deployment.

Init containers, in this order: `plugin` copies Osprey's drafter class for SGLang into a volume, where there is a
drafter; `fetch` downloads what `ServerFiles` names and verifies it. The server has neither storage keys nor a
hub token.
"""

from collections.abc import Sequence
from typing import Any

from osprey_api.drafter import OspreyDrafterSpec
from osprey_api.naming import (
    DRAFTER_PATH,
    MODEL_PATH,
    PLUGIN_PATH,
    SERVER_PORT,
)
from osprey_api.sources import ClaimSource, parse
from osprey_api.stages import Engine, Pinned, Speculation
from osprey_operator.manifests.pod import Disk, claims, container, credentials, empty, hub_token, literal, model_cache
from osprey_operator.manifests.pod import gpus as gpu_resources
from osprey_operator.manifests.pod import variable as env_variable
from osprey_operator.state import KubernetesObject, Settings

_PRE_STOP = """
import os, signal, socket, sys, time
time.sleep(float(sys.argv[1]))
while True:
    try:
        socket.create_connection(("127.0.0.1", int(sys.argv[2])), timeout=30).close()
        break
    except TimeoutError:
        break
    except OSError:
        os.kill(1, signal.SIGQUIT)
        time.sleep(1)
"""
"""Run before a server's SIGTERM. SGLang answers SIGTERM by draining, but only once it listens: while it starts the
signal is lost, as it is process 1, and the pod would hold its GPUs for the whole grace period. SIGQUIT is how its
own children tell it that one of them failed: while it starts it then kills them and ends."""


def pre_stop(delay_seconds: int) -> KubernetesObject:
    """Return the `lifecycle` of a server that takes requests for so long after its pod was told to go."""
    return {"preStop": {"exec": {"command": ["python3", "-c", _PRE_STOP, str(delay_seconds), str(SERVER_PORT)]}}}


def model_path(target: Pinned) -> str:
    """Return where the server finds the target."""
    source = parse(target.uri)
    return source.mounted_path if isinstance(source, ClaimSource) else MODEL_PATH


def gpu_count(spec: OspreyDrafterSpec) -> int:
    """Return the GPUs of one server."""
    return spec.target.tensor_parallel if spec.target.gpus is None else spec.target.gpus


def disks(spec: OspreyDrafterSpec, target: Pinned, *, drafter: bool, more_claims: Sequence[str] = ()) -> list[Disk]:
    """Return the volumes of a pod with a server, as `fetch` and `plugin` see them: writable."""
    return [
        empty("model", MODEL_PATH),
        *((empty("drafter", DRAFTER_PATH), empty("plugin", PLUGIN_PATH)) if drafter else ()),
        *model_cache(spec.model_cache),
        *claims((target.uri, *more_claims), spec.model_cache),
    ]


def before_server(
    *,
    spec: OspreyDrafterSpec,
    settings: Settings,
    credentials_secret: str | None,
    disks: Sequence[Disk],
    drafter: bool,
    fetch_env: Sequence[KubernetesObject] = (),
) -> list[KubernetesObject]:
    """Return the init containers `plugin`, where there is a drafter, and `fetch`."""
    plugin = container(
        "plugin",
        settings.serving_image,
        settings,
        command=["python3", "-m", "osprey_serving.plugin_install", PLUGIN_PATH],
        disks=[disk for disk in disks if disk.path == PLUGIN_PATH],
    )
    fetch = container(
        "fetch",
        settings.serving_image,
        settings,
        command=["python3", "-m", "osprey_serving", "fetch"],
        env=[*fetch_env, *hub_token(spec.hub_credentials_secret)],
        envFrom=credentials(credentials_secret),
        disks=[disk for disk in disks if disk.path != PLUGIN_PATH],
    )
    return [*([plugin] if drafter else []), fetch]


def server(
    *,
    spec: OspreyDrafterSpec,
    settings: Settings,
    target: Pinned,
    engine: Engine,
    speculation: Speculation | None,
    host: str,
    disks: Sequence[Disk],
    more_args: Sequence[str] = (),
    more_env: Sequence[KubernetesObject] = (),
    **more: Any,
) -> KubernetesObject:
    """Return the container `server`; with `speculation` it drafts, by the drafter at `naming.DRAFTER_PATH`.

    The user's arguments come first: of an argument given twice SGLang takes the last, and ours are not for change.
    """
    image = None if spec.serving is None else spec.serving.image
    return container(
        "server",
        image or settings.sglang_image,
        settings,
        command=["python3", "-m", "sglang.launch_server"],
        args=[
            *map(literal, engine.server_args),
            *("--model-path", literal(model_path(target))),
            *("--host", host),
            *("--port", str(SERVER_PORT)),
            *("--tp-size", str(engine.tensor_parallel)),
            "--enable-metrics",
            *([] if speculation is None else _speculation_args(speculation)),
            *more_args,
        ],
        env=[*more_env, *([] if speculation is None else [env_variable("PYTHONPATH", PLUGIN_PATH)])],
        ports=[{"name": "http", "containerPort": SERVER_PORT}],
        resources=gpu_resources(gpu_count(spec)),
        disks=disks,
        **more,
    )


def _speculation_args(speculation: Speculation) -> list[str]:
    return [
        *("--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", DRAFTER_PATH),
        *("--speculative-num-steps", str(speculation.steps)),
        *("--speculative-eagle-topk", str(speculation.top_k)),
        *("--speculative-num-draft-tokens", str(speculation.draft_tokens)),
    ]
