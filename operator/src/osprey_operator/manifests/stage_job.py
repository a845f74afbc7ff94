"""The Job of a stage and, where it runs on several nodes, the headless Service by which its pods find each other.

A Job is one attempt: `backoffLimit` is 0 and the operator counts. Only a pod that was evicted or preempted is
replaced by the Job itself, once it is gone. Exit code 64, wrong input, fails the Job like any other; the rule
names it so that the Job's condition tells.
"""

from collections.abc import Mapping
from typing import Any, assert_never

from osprey_api.backbone import OspreyBackboneSpec
from osprey_api.common import Storage
from osprey_api.conditions import ExitCode
from osprey_api.drafter import OspreyDrafterSpec
from osprey_api.fingerprint import sha256
from osprey_api.naming import (
    ANNOTATION_TEMPLATE_HASH,
    METRICS_PORT,
    RENDEZVOUS_PORT,
    RENDEZVOUS_VARIABLE,
    SERVER_PORT,
    stage_job_name,
)
from osprey_api.serving import WANTED_VARIABLE, ServerFiles
from osprey_api.stages import (
    ATTEMPT_VARIABLE,
    GRACE_PERIOD_VARIABLE,
    SERVER_URL_VARIABLE,
    TASK_VARIABLE,
    AdoptConfig,
    BaselineConfig,
    CaptureConfig,
    ConvertConfig,
    DistilConfig,
    EvaluateConfig,
    InputRole,
    PretrainConfig,
    PruneConfig,
    RegenerateConfig,
    ResolveConfig,
    StageConfig,
    StageName,
    StageTask,
    TokenizeConfig,
)
from osprey_operator.manifests import sglang
from osprey_operator.manifests.metadata import metadata, service_name, stage_labels
from osprey_operator.manifests.pod import (
    Disk,
    claims,
    container,
    credentials,
    gpus,
    hub_token,
    model_cache,
    template,
    variable,
)
from osprey_operator.state import KubernetesObject, Owner, Settings

DISTRIBUTED = frozenset({StageName.PRETRAIN, StageName.CAPTURE, StageName.DISTIL})
"""Stages that run on `job.nodes` times `job.gpusPerNode` processes."""
JOB_UID_LABEL = "batch.kubernetes.io/controller-uid"
JOB_NAME_LABEL = "batch.kubernetes.io/job-name"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_CLIENT = (RegenerateConfig, BaselineConfig, EvaluateConfig)


def stage_job(
    *,
    owner: Owner,
    task: StageTask,
    spec: OspreyBackboneSpec | OspreyDrafterSpec,
    storage: Storage,
    settings: Settings,
) -> list[KubernetesObject]:
    """Return the Job of `task`, after the headless Service that it needs on several nodes."""
    name = stage_job_name(owner.name, task.stage, task.fingerprint)
    nodes = task.execution.nodes if task.stage in DISTRIBUTED else 1
    labels = stage_labels(owner, task)
    job_labels = labels if spec.job.queue is None else {**labels, QUEUE_LABEL: spec.job.queue}
    overrides = spec.job.stages.get(task.stage)
    deadline = spec.job.deadline_seconds
    if overrides is not None and overrides.deadline_seconds is not None:
        deadline = overrides.deadline_seconds
    job_spec: KubernetesObject = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed" if nodes > 1 else "NonIndexed",
        "backoffLimit": 0,
        "activeDeadlineSeconds": deadline,
        "podReplacementPolicy": "Failed",  # two attempts at once would write the same checkpoints
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": "stage",
                        "operator": "In",
                        "values": [int(ExitCode.WRONG_INPUT)],
                    },
                },
            ]
        },
        "suspend": spec.job.queue is not None,  # Kueue starts it
        "template": _pod_template(
            labels=labels,
            task=task,
            spec=spec,
            storage=storage,
            settings=settings,
            subdomain=service_name(name) if nodes > 1 else None,
            rendezvous=f"{name}-0.{service_name(name)}",
        ),
    }
    job: KubernetesObject = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(owner, name, job_labels, {ANNOTATION_TEMPLATE_HASH: sha256(job_spec)}),
        "spec": job_spec,
    }
    return [job] if nodes == 1 else [_headless_service(owner, name, labels), job]


def _headless_service(owner: Owner, job: str, labels: dict[str, str]) -> KubernetesObject:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(owner, service_name(job), labels),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the ranks have to meet before any of them is ready
            "selector": {JOB_NAME_LABEL: job},
            "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}],
        },
    }


def _pod_template(
    *,
    labels: dict[str, str],
    task: StageTask,
    spec: OspreyBackboneSpec | OspreyDrafterSpec,
    storage: Storage,
    settings: Settings,
    subdomain: str | None,
    rendezvous: str,
) -> KubernetesObject:
    init_containers: list[KubernetesObject] = []
    disks: list[Disk] = [*model_cache(spec.model_cache), *claims(_sources(task.config), spec.model_cache)]
    env: list[KubernetesObject] = []
    if isinstance(task.config, _CLIENT):
        if not isinstance(spec, OspreyDrafterSpec):
            raise TypeError(f"{task.stage} is a stage of drafters")
        server_disks, init_containers = _server(task, task.config, spec, storage, settings)
        disks = server_disks
        env = [variable(SERVER_URL_VARIABLE, f"http://127.0.0.1:{SERVER_PORT}")]
    stage = container(
        "stage",
        settings.serving_image if isinstance(task.config, _CLIENT) else settings.trainer_image,
        settings,
        command=[
            "python3",
            "-m",
            "osprey_serving" if isinstance(task.config, _CLIENT) else "osprey_trainer",
            task.stage,
        ],
        env=[
            variable(TASK_VARIABLE, task.model_dump_json()),
            {
                "name": ATTEMPT_VARIABLE,
                "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{JOB_UID_LABEL}']"}},
            },
            variable(GRACE_PERIOD_VARIABLE, str(spec.job.grace_period_seconds)),
            *([] if subdomain is None else [variable(RENDEZVOUS_VARIABLE, rendezvous)]),
            *env,
            *hub_token(spec.hub_credentials_secret),
        ],
        envFrom=credentials(storage.credentials_secret),
        ports=[{"name": "metrics", "containerPort": METRICS_PORT}],
        resources=gpus(spec.job.gpus_per_node) if task.stage in DISTRIBUTED else {},
        disks=disks,
    )
    overrides = spec.job.stages.get(task.stage)
    fragments: list[Mapping[str, Any] | None] = [settings.pod_template, spec.job.template]
    return template(
        labels=labels,
        annotations={"prometheus.io/scrape": "true", "prometheus.io/port": str(METRICS_PORT)},
        init_containers=init_containers,
        containers=[stage],
        disks=disks,
        grace_period_seconds=spec.job.grace_period_seconds,
        fragments=[*fragments, None if overrides is None else overrides.template],
        restartPolicy="Never",
        **({} if subdomain is None else {"subdomain": subdomain}),
    )


def _server(
    task: StageTask,
    config: RegenerateConfig | BaselineConfig | EvaluateConfig,
    spec: OspreyDrafterSpec,
    storage: Storage,
    settings: Settings,
) -> tuple[list[Disk], list[KubernetesObject]]:
    """Return the volumes and the init containers of a stage that talks to a server; the server is the last one."""
    speculation = config.speculation if isinstance(config, EvaluateConfig) else None
    drafter = task.inputs[InputRole.DRAFTER] if isinstance(config, EvaluateConfig) else None
    disks = sglang.disks(
        spec, config.target, drafter=drafter is not None, more_claims=[prompt.source.uri for prompt in config.prompts]
    )
    files = ServerFiles(storage=task.storage, target=config.target, drafter=drafter)
    return disks, [
        *sglang.before_server(
            spec=spec,
            settings=settings,
            credentials_secret=storage.credentials_secret,
            disks=disks,
            drafter=drafter is not None,
            fetch_env=[variable(WANTED_VARIABLE, files.model_dump_json())],
        ),
        sglang.server(
            spec=spec,
            settings=settings,
            target=config.target,
            engine=config.engine,
            speculation=speculation,
            host="127.0.0.1",
            disks=disks,
            restartPolicy="Always",  # a sidecar; without a startup probe, since the client waits, with a deadline
            lifecycle=sglang.pre_stop(0),
        ),
    ]


def _sources(config: StageConfig) -> list[str]:
    """Return the URIs that a stage reads."""
    match config:
        case ResolveConfig():
            return [config.model.uri, *(data.uri for data in config.data)]
        case PruneConfig():
            return [config.source.uri]
        case TokenizeConfig():
            return [config.tokenizer.uri, *(data.source.uri for data in config.data)]
        case PretrainConfig():
            return []
        case CaptureConfig() | AdoptConfig() | ConvertConfig() | DistilConfig():
            return [config.target.uri]
        case RegenerateConfig() | BaselineConfig() | EvaluateConfig():
            return [config.target.uri, *(prompt.source.uri for prompt in config.prompts)]
        case _:
            assert_never(config)
