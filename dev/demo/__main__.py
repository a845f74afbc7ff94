"""Command line of the demonstration: `python -m dev.demo [--keep]`."""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from dev import models, processes
from dev.cluster.cluster import Cluster, ClusterError
from dev.demo import load, results
from dev.demo.memory import PeakMemory
from dev.demo.monitoring import Follow, scrape_configs
from dev.demo.prompts import prompts
from dev.demo.report import Live, Report, acceptance_ratio
from dev.demo.text import documents
from dev.demo.watch import GaveUpError, Watch
from dev.install import CommandError, Installation, Keys
from dev.services import REGION, Prometheus, S3Server
from dev.settings import REPOSITORY
from osprey_api.stages import StageName, StorageLocation

EXAMPLE = REPOSITORY / "examples" / "smollm2-cpu"
REPORT = REPOSITORY / "build" / "demo" / "report.json"
NAME, NAMESPACE, BUCKET = "demo", "demo", "osprey"
METRICS = "osprey-osprey-operator-metrics"
OSPREY, EAGLE3 = "smollm2-osprey", "smollm2-eagle3"
PROMPTS = {"maths": 204, "code": 204, "general": 204, "letters": 24}
"""Prompts of each domain, held-out ones among them."""
READY_SECONDS = 60 * 60
LOAD_SECONDS = 60
_environment = os.environ  # noqa: TID251 - an entry point


def main(words: Sequence[str]) -> None:
    """Show everything once, and leave nothing behind unless asked to."""
    parser = argparse.ArgumentParser(prog="python -m dev.demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the cluster and its servers up")
    parser.add_argument("--down", action="store_true", help="only take down what --keep left up")
    asked = parser.parse_args(words)
    down()
    if asked.down:
        return
    began = time.monotonic()
    with ExitStack() as stack:
        if not asked.keep:
            stack.callback(down)
        memory = stack.enter_context(PeakMemory())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target = models.ensure()
        say("a Kubernetes cluster of one node, and S3")
        cluster = Cluster(NAME)
        cluster.up()
        s3 = S3Server(cluster.state / "s3", cluster.host_address)
        s3.start()
        upload(s3)
        say("the operator, by Helm, and Prometheus")
        keys = Keys(f"s3://{BUCKET}/artifacts", s3.endpoint, REGION, s3.access_key, s3.secret_key)
        installation = Installation(cluster, "osprey-system", keys)
        installation.up()
        installation.prepare(NAMESPACE, {"models": target.parent})
        prometheus = Prometheus(
            cluster.state / "prometheus",
            scrape_configs(operator=address_of(installation, METRICS, installation.namespace)),
        )
        prometheus.start()
        say(f"kubectl apply -f {EXAMPLE.relative_to(REPOSITORY)}/")
        installation.run("kubectl", "apply", "-n", NAMESPACE, "-f", EXAMPLE)
        if asked.keep:
            say(f'look around meanwhile: eval "$(python3 -m dev.cluster env --name {NAME})"; kubectl get osprey -A')

        def read() -> list[Mapping[str, Any]]:
            items: list[Mapping[str, Any]] = installation.read("osprey", "-n", NAMESPACE)["items"]
            return items

        Watch(read).until_ready(seconds=READY_SECONDS)
        say(f"a small load on the servers, for {LOAD_SECONDS} s")
        live = under_load(installation, prometheus)
        say("the trainer's simulation of what was served, and the report")
        with storage_keys(s3):
            location = StorageLocation(uri=keys.uri, endpoint=keys.endpoint, region=keys.region)
            report = make_report(
                resources=read(),
                storage=location,
                target=target,
                scratch=scratch,
                live=live,
                began=began,
                memory=memory,
            )
        REPORT.parent.mkdir(parents=True, exist_ok=True)
        REPORT.write_text(json.dumps(report.json(), indent=1) + "\n")
        sys.stdout.write(f"\n{installation.run('kubectl', 'get', 'osprey', '-n', NAMESPACE)}\n{report.text()}\n")
        say(f"the same as JSON: {REPORT.relative_to(REPOSITORY)}")
        if asked.keep:
            tell_how_to_look(cluster, s3, prometheus)


def say(line: str) -> None:
    """Tell a person what comes next."""
    sys.stdout.write(f"== {line}\n")
    sys.stdout.flush()


def down() -> None:
    """Remove whatever a demonstration left up; the servers' folders are in the cluster's, and go with it."""
    Cluster(NAME).down()


def address_of(installation: Installation, service: str, namespace: str) -> str:
    """Return host and port of a Service; this machine reaches those of its cluster."""
    spec = installation.read("service", service, "-n", namespace)["spec"]
    return f"{spec['clusterIP']}:{spec['ports'][0]['port']}"


def upload(s3: S3Server) -> None:
    """Put the prompts and the text into the bucket, as JSON Lines."""
    client = boto3.client(
        "s3",
        endpoint_url=s3.endpoint,
        aws_access_key_id=s3.access_key,
        aws_secret_access_key=s3.secret_key,
        region_name=REGION,
        config=Config(signature_version="s3v4"),
    )
    client.create_bucket(Bucket=BUCKET)
    files = {domain: json_lines("prompt", prompts(domain, count)) for domain, count in PROMPTS.items()}
    files["text"] = json_lines("text", documents())
    for name, body in files.items():
        client.put_object(Bucket=BUCKET, Key=f"data/{name}.jsonl", Body=body)


def json_lines(field: str, values: Sequence[str] | Iterator[str]) -> bytes:
    """Write each value as a JSON object on a line."""
    return "".join(f"{json.dumps({field: value})}\n" for value in values).encode()


def under_load(installation: Installation, prometheus: Prometheus) -> Live:
    """Ask the served model for a while and return what Prometheus says of it."""
    url = f"http://{address_of(installation, OSPREY, NAMESPACE)}"
    asked = [prompt for domain in PROMPTS for prompt in prompts(domain, 20, seed=1)]
    selector = f'{{namespace="{NAMESPACE}",name="{OSPREY}"}}'
    queries = {
        "acceptance": f"osprey_drafter_acceptance_length{selector}",
        "speed": f"osprey_drafter_tokens_per_second{selector}",
    }
    with Follow(prometheus.url, queries) as follow:
        load.run(url, asked, seconds=LOAD_SECONDS, concurrency=8, max_tokens=96)
        follow.wait(60)
    return Live(follow.answers["acceptance"], follow.answers["speed"])


def make_report(
    *,
    resources: Sequence[Mapping[str, Any]],
    storage: StorageLocation,
    target: Path,
    scratch: Path,
    live: Live,
    began: float,
    memory: PeakMemory,
) -> Report:
    """Read the artifacts and compare."""
    drafters = {resource["metadata"]["name"]: resource for resource in resources}
    compared = {name: drafters[name] for name in (OSPREY, EAGLE3)}
    read = {name: results.read_evaluation(resource, storage, scratch) for name, resource in compared.items()}
    ours, theirs = read[OSPREY].requests, read[EAGLE3].requests
    domains = dict.fromkeys(request.domain for request in ours)
    return Report(
        evaluations={name: evaluation.result for name, evaluation in read.items()},
        supervised_tokens={
            name: int(results.stage(resource, StageName.DISTIL)["metrics"]["supervised_tokens"])
            for name, resource in compared.items()
        },
        ratio=acceptance_ratio(ours, theirs),
        ratio_by_domain={
            domain: acceptance_ratio(
                [request for request in ours if request.domain == domain],
                [request for request in theirs if request.domain == domain],
            )
            for domain in domains
        },
        simulated_steps_equal={
            name: share_equal(
                results.simulated_steps(compared[name], evaluation, storage, target, scratch),
                [request.verify_steps for request in evaluation.requests],
            )
            for name, evaluation in read.items()
        },
        stages=results.costs(resources),
        live=live,
        seconds=time.monotonic() - began,
        peak_memory_gib=memory.gib,
    )


def share_equal(simulated: Sequence[int], served: Sequence[int]) -> float:
    """Return the share of requests in which both count the same."""
    return sum(a == b for a, b in zip(simulated, served, strict=True)) / len(served)


@contextmanager
def storage_keys(s3: S3Server) -> Iterator[None]:
    """Let our own reading of artifacts find the keys where a stage's pod would."""
    keys = {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret_key}
    before = {name: _environment.get(name) for name in keys}
    _environment.update(keys)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del _environment[name]
            else:
                _environment[name] = value


def tell_how_to_look(cluster: Cluster, s3: S3Server, prometheus: Prometheus) -> None:
    """Print the commands for the cluster that stays up."""
    sys.stdout.write(
        f"""
It stays up. To look around:
  eval "$(python3 -m dev.cluster env --name {cluster.name})"
  kubectl get osprey -n {NAMESPACE}
  kubectl describe od {OSPREY} -n {NAMESPACE}
  kubectl get jobs,pods -n {NAMESPACE}
  kubectl edit od {OSPREY} -n {NAMESPACE}     # another learningRate: distil and evaluate run again
Prometheus: {prometheus.url}     S3: {s3.endpoint} (bucket {BUCKET})
To take it down: python3 -m dev.demo --down
"""
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (CommandError, ClusterError, GaveUpError, processes.NotReadyError, FileNotFoundError, TimeoutError) as error:
        sys.exit(f"error: {error}")
