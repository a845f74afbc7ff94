"""The servers of a drafter: Deployment, Service, the ConfigMap that says what they load, the Secret of their key.

Of an upgrade of the operator the pod template shows only what changed in it: the serving image, which prepares and
watches the server. So a new one rolls the servers, and whoever pins `images.serving` decides when. The files that a
server loads are named in a ConfigMap that is called by its content: another drafter is another template, and the
Deployment rolls.
"""

import base64

from osprey_api.common import Storage
from osprey_api.drafter import OspreyDrafterSpec, Rollout, RolloutStrategy, Serving
from osprey_api.fingerprint import sha256
from osprey_api.naming import METRICS_PORT, SERVER_PORT, WANTED_PATH, fingerprint_label, shortened
from osprey_api.serving import ADMIN_KEY_VARIABLE, ServerFiles
from osprey_api.stages import SERVER_URL_VARIABLE, ArtifactRef, Engine, Pinned, StorageLocation
from osprey_operator.manifests import sglang
from osprey_operator.manifests.metadata import (
    LABEL_DRAFTER,
    LABEL_OWNER_UID,
    NO_DRAFTER,
    Component,
    identity,
    metadata,
    service_name,
)
from osprey_operator.manifests.pod import Disk, container, credentials, secret_variable, template, variable
from osprey_operator.state import KubernetesObject, Owner, Settings

NAME_LIMIT = 52
"""The Deployment's name, with the 11 characters that its ReplicaSets add, fits a label."""
DRAIN_DELAY_SECONDS = 10
"""A stopped server still takes requests for so long: until every node has heard that it is no endpoint any more."""
GRACE_PERIOD_SECONDS = 600
"""The drain delay, and then as long as the longest answer may take."""
PROGRESS_DEADLINE_SECONDS = 7200


def server_name(owner: Owner) -> str:
    """Return the name of the Deployment and of the Service."""
    return service_name(owner.name, NAME_LIMIT)


def admin_secret_name(owner: Owner) -> str:
    """Return the name of the Secret with SGLang's admin key.

    By the resource's UID it is nobody else's, so the operator need not look whose it is, and has no right to read one.
    """
    return f"{shortened(owner.name, NAME_LIMIT)}-admin-key-{sha256(owner.uid)[:10]}"


def admin_secret(owner: Owner, key: str) -> KubernetesObject:
    """Return the Secret with SGLang's admin key, which weight updates need. Made once: a new key restarts servers."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(owner, admin_secret_name(owner), identity(owner, Component.SERVER)),
        "type": "Opaque",
        "data": {ADMIN_KEY_VARIABLE: base64.b64encode(key.encode()).decode()},
    }


def server_objects(
    *,
    owner: Owner,
    spec: OspreyDrafterSpec,
    target: Pinned,
    drafter: ArtifactRef | None,
    storage: Storage,
    settings: Settings,
    admin_key_secret: str,
) -> list[KubernetesObject]:
    """Return ConfigMap, Deployment and Service, for server-side apply. Without a drafter the target serves alone.

    Raises:
        ValueError: the spec asks for no servers.
    """
    serving = spec.serving
    if serving is None:
        raise ValueError("spec.serving is unset: there is nothing to serve")
    name = server_name(owner)
    selector = identity(owner, Component.SERVER)
    files = ServerFiles(
        storage=StorageLocation(uri=storage.uri, endpoint=storage.endpoint, region=storage.region),
        target=target,
        drafter=drafter,
    )
    content = files.model_dump_json()
    config_map: KubernetesObject = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(owner, f"{name}-{sha256(content)[:10]}", selector),
        "immutable": True,
        "data": {WANTED_PATH.rpartition("/")[2]: content},
    }
    deployment: KubernetesObject = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(owner, name, selector),
        "spec": {
            **({} if serving.replicas is None else {"replicas": serving.replicas}),
            "selector": {"matchLabels": selector},
            "strategy": _strategy(serving.rollout),
            "revisionHistoryLimit": 1,
            "progressDeadlineSeconds": PROGRESS_DEADLINE_SECONDS,
            "template": _pod_template(
                owner=owner,
                spec=spec,
                serving=serving,
                target=target,
                drafter=drafter,
                storage=storage,
                settings=settings,
                config_map=config_map["metadata"]["name"],
                admin_key_secret=admin_key_secret,
            ),
        },
    }
    service: KubernetesObject = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(owner, name, selector),
        "spec": {
            "type": "ClusterIP",
            "selector": selector,
            "ports": [{"name": "http", "port": SERVER_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }
    return [config_map, deployment, service]


def _strategy(rollout: Rollout) -> KubernetesObject:
    if rollout.strategy is RolloutStrategy.RECREATE:
        return {"type": "Recreate"}
    unavailable = 0 if rollout.max_surge else 1  # without spare GPUs a server goes before the next one comes
    return {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": unavailable},
    }


def _pod_template(
    *,
    owner: Owner,
    spec: OspreyDrafterSpec,
    serving: Serving,
    target: Pinned,
    drafter: ArtifactRef | None,
    storage: Storage,
    settings: Settings,
    config_map: str,
    admin_key_secret: str,
) -> KubernetesObject:
    server_disks = sglang.disks(spec, target, drafter=drafter is not None)
    wanted = Disk({"name": "wanted", "configMap": {"name": config_map}}, WANTED_PATH.rpartition("/")[0], read_only=True)
    admin_key = secret_variable(ADMIN_KEY_VARIABLE, admin_key_secret, ADMIN_KEY_VARIABLE)
    sync = container(
        "sync",
        settings.serving_image,
        settings,
        command=["python3", "-m", "osprey_serving", "sync"],
        env=[variable(SERVER_URL_VARIABLE, f"http://127.0.0.1:{SERVER_PORT}"), admin_key],
        envFrom=credentials(storage.credentials_secret),
        disks=[*server_disks, wanted],
        ports=[{"name": "metrics", "containerPort": METRICS_PORT}],
        # Ready once the server drafts with what is wanted. Later a failure of its own has to last five minutes to
        # take a server that works out of the Service.
        readinessProbe={
            "httpGet": {"path": "/readyz", "port": "metrics"},
            "timeoutSeconds": 5,
            "periodSeconds": 5,
            "failureThreshold": 60,
        },
        restartPolicy="Always",
    )
    server = sglang.server(
        spec=spec,
        settings=settings,
        target=target,
        engine=Engine(
            version=settings.sglang_version,
            server_args=spec.target.server_args,
            tensor_parallel=spec.target.tensor_parallel,
        ),
        speculation=None if drafter is None else serving.speculation,
        host="0.0.0.0",  # noqa: S104 - the Service has to reach it
        disks=server_disks,
        more_args=[f"--admin-api-key=$({ADMIN_KEY_VARIABLE})"],  # one word: a key may begin with "-"
        more_env=[admin_key],
        lifecycle=sglang.pre_stop(DRAIN_DELAY_SECONDS),
        **_probes(),
    )
    return template(
        labels={
            **identity(owner, Component.SERVER),
            LABEL_OWNER_UID: owner.uid,
            LABEL_DRAFTER: NO_DRAFTER if drafter is None else fingerprint_label(drafter.digest.removeprefix("sha256:")),
        },
        annotations={"prometheus.io/scrape": "true", "prometheus.io/port": str(SERVER_PORT)},
        init_containers=[
            *sglang.before_server(
                spec=spec,
                settings=settings,
                credentials_secret=storage.credentials_secret,
                disks=[*server_disks, wanted],
                drafter=drafter is not None,
            ),
            sync,
        ],
        containers=[server],
        disks=[*server_disks, wanted],
        grace_period_seconds=GRACE_PERIOD_SECONDS,
        fragments=[settings.pod_template, serving.template],
    )


def _probes() -> KubernetesObject:
    """Return the probes: SGLang's /health generates a token, unless the server is busy, and never takes under 1 s.

    It gives up by itself after 20 s, so that a shorter timeout here would be the one that speaks: the default of
    1 s always would. A long prefill or two busy cores may well take that long, so one miss means nothing.
    """
    probe = {"httpGet": {"path": "/health", "port": "http"}, "timeoutSeconds": 30}
    return {
        "startupProbe": {**probe, "periodSeconds": 5, "failureThreshold": 720},  # one hour to load the weights
        "readinessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 3},
        "livenessProbe": {**probe, "periodSeconds": 30, "failureThreshold": 10},
    }
