"""Command line of the demonstration: `python -m dev.demo [--keep]`."""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from dev import models, processes
from dev.cluster.cluster import ClusterError
from dev.demo import load, results
from dev.demo.memory import PeakMemory
from dev.demo.monitoring import Follow
from dev.demo.prompts import prompts
from dev.demo.report import Live, Report, acceptance_ratio
from dev.demo.sites import NAMESPACE, Local, Site, SiteError, choose, json_lines, variables
from dev.demo.text import documents
from dev.demo.watch import GaveUpError, Watch
from dev.kubectl import CommandError
from dev.settings import REPOSITORY
from osprey_api.stages import StageName, StorageLocation

EXAMPLE = REPOSITORY / "examples" / "smollm2-cpu"
REPORT = REPOSITORY / "build" / "demo" / "report.json"
OSPREY, EAGLE3 = "smollm2-osprey", "smollm2-eagle3"
PROMPTS = {"maths": 136, "code": 136, "general": 136, "letters": 16}
"""Prompts of each domain, held-out ones among them."""
READY_SECONDS = 2 * 60 * 60
LOAD_SECONDS = 60
ACCEPTANCE, SPEED = "osprey_drafter_acceptance_length", "osprey_drafter_tokens_per_second"


def main(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Show everything once, and leave nothing behind on this machine unless asked to."""
    parser = argparse.ArgumentParser(prog="python -m dev.demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the cluster and its servers up")
    parser.add_argument("--down", action="store_true", help="only take down what --keep left up")
    asked = parser.parse_args(words)
    if asked.down:
        Local().down()
        return
    site = choose(environment)
    disable_progress_bar()
    began = time.monotonic()
    with ExitStack() as stack:
        if isinstance(site, Local):
            site.down()
            if not asked.keep:
                stack.callback(site.down)
        memory = stack.enter_context(PeakMemory())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target = models.ensure()
        data = {f"{domain}.jsonl": json_lines("prompt", iter(prompts(domain, n))) for domain, n in PROMPTS.items()}
        data["text.jsonl"] = json_lines("text", documents())
        say("the cluster, S3, Prometheus, and the operator by Helm")
        site.up(target, data)
        say(f"kubectl apply -f {EXAMPLE.relative_to(REPOSITORY)}/")
        site.kubectl.run("kubectl", "apply", "-n", NAMESPACE, "-f", "-", text=site.manifests(EXAMPLE))
        if asked.keep:
            say(f"look around meanwhile:\n{site.look()}")

        def read() -> list[Mapping[str, Any]]:
            items: list[Mapping[str, Any]] = site.kubectl.read("ospreydrafters,ospreybackbones", "-n", NAMESPACE)[
                "items"
            ]
            return items

        Watch(read).until_ready(seconds=READY_SECONDS)
        say(f"a small load on the servers, for {LOAD_SECONDS} s")
        live = under_load(site)
        say("the trainer's simulation of what was served, and the report")
        with variables(site.keys):
            report = make_report(
                resources=read(),
                storage=site.storage,
                target=target,
                scratch=scratch,
                live=live,
                began=began,
                memory=memory,
            )
        REPORT.parent.mkdir(parents=True, exist_ok=True)
        REPORT.write_text(json.dumps(report.json(), indent=1) + "\n")
        table = site.kubectl.run("kubectl", "get", "ospreydrafters,ospreybackbones", "-n", NAMESPACE)
        sys.stdout.write(f"\n{table}\n{report.text()}\n")
        say(f"the same as JSON: {REPORT.relative_to(REPOSITORY)}")
        if asked.keep or not isinstance(site, Local):
            say(f"it stays up; kubectl get osprey -n {NAMESPACE}\n{site.look()}")


def say(line: str) -> None:
    """Tell a person what comes next."""
    sys.stdout.write(f"== {line}\n")
    sys.stdout.flush()


def under_load(site: Site) -> Live:
    """Ask the served model for a while and return what the operator's figures say of it."""
    asked = [prompt for domain in PROMPTS for prompt in prompts(domain, 20, seed=1)]
    labels = {"namespace": NAMESPACE, "name": OSPREY}
    with (
        site.service(OSPREY, NAMESPACE) as url,
        site.metrics() as ask,
        Follow(ask, (ACCEPTANCE, SPEED), labels) as follow,
    ):
        load.run(url, asked, seconds=LOAD_SECONDS, concurrency=8, max_tokens=96)
        follow.wait(60)
    return Live(follow.values[ACCEPTANCE], follow.values[SPEED])


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


if __name__ == "__main__":
    try:
        main(sys.argv[1:], os.environ)  # noqa: TID251 - the entry point
    except (
        SiteError,
        CommandError,
        ClusterError,
        GaveUpError,
        processes.NotReadyError,
        FileNotFoundError,
        TimeoutError,
    ) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
