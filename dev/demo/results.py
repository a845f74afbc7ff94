"""Read what the resources came to: their status, and the artifacts of their evaluations in S3."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dev.demo import simulation
from dev.demo.report import Request, StageCost
from osprey_api.stages import ArtifactRef, EvaluateResult, StageName, StorageLocation
from osprey_runtime import manifest


@dataclass(frozen=True)
class Evaluation:
    """An evaluation's artifact."""

    result: EvaluateResult
    lines: Sequence[Mapping[str, Any]]

    @property
    def requests(self) -> list[Request]:
        """The requests, as the report compares them."""
        return [
            Request(
                domain=line["domain"],
                prompt_ids=tuple(line["prompt_ids"]),
                completion_tokens=line["completion_tokens"],
                verify_steps=line["verify_steps"],
            )
            for line in self.lines
        ]


def stage(resource: Mapping[str, Any], name: StageName) -> Mapping[str, Any]:
    """Return a stage's entry in a resource's status."""
    entry: Mapping[str, Any] = next(entry for entry in resource["status"]["stages"] if entry["name"] == name)
    return entry


def artifact(resource: Mapping[str, Any], name: StageName) -> ArtifactRef:
    """Return what a stage of a resource made."""
    return ArtifactRef.model_validate(stage(resource, name)["artifact"])


def costs(resources: Sequence[Mapping[str, Any]]) -> list[StageCost]:
    """Return what each stage of each resource took; one that several resources share is listed once, with them all."""
    found: dict[str, StageCost] = {}
    for resource in resources:
        name = resource["metadata"]["name"]
        for entry in resource["status"]["stages"]:
            metrics = entry["metrics"]
            cost = StageCost(
                resources=(name,),
                stage=entry["name"],
                seconds=metrics["seconds"],
                peak_memory_gib=metrics["peak_memory_bytes"] / 2**30,
            )
            other = found.get(entry["fingerprint"])
            found[entry["fingerprint"]] = replace(other, resources=(*other.resources, name)) if other else cost
    return list(found.values())


def read_evaluation(resource: Mapping[str, Any], storage: StorageLocation, scratch: Path) -> Evaluation:
    """Download the artifact of a drafter's evaluation, digests verified."""
    folder = fetch(artifact(resource, StageName.EVALUATE), storage, scratch)
    lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    report = (folder / "report.json").read_text(encoding="utf-8")
    return Evaluation(EvaluateResult.model_validate_json(report), [json.loads(line) for line in lines])


def simulated_steps(
    resource: Mapping[str, Any], evaluation: Evaluation, storage: StorageLocation, target: Path, scratch: Path
) -> list[int]:
    """Return the verify steps of an evaluation's requests as the trainer simulates them."""
    drafter = fetch(artifact(resource, StageName.DISTIL), storage, scratch)
    steps = len(evaluation.result.acceptance_by_position)
    return simulation.verify_steps(target, drafter, evaluation.lines, steps=steps)


def fetch(made: ArtifactRef, storage: StorageLocation, scratch: Path) -> Path:
    """Download an artifact, digests verified, unless it is there."""
    folder = scratch / made.digest.replace(":", "-")
    return folder if folder.exists() else manifest.fetch(storage, made, folder)
