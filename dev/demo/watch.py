"""Tell what goes on while the resources get ready: a line for each change, and progress in between."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Resource = Mapping[str, Any]
FINISHED = ("Succeeded", "Failed")
QUIET_S = 30


class GaveUpError(RuntimeError):
    """The resources did not get ready; the message has what they say of themselves."""


@dataclass
class Watch:
    """Follow resources until all are ready.

    Attributes:
        read: returns the resources as they are.
        out: takes a line.
    """

    read: Callable[[], Sequence[Resource]]
    out: Callable[[str], object] = sys.stdout.write
    _began: float = field(default_factory=time.monotonic, init=False)
    _told: dict[tuple[str, str], str] = field(default_factory=dict, init=False)
    _last: float = field(default=0.0, init=False)

    def until_ready(self, *, seconds: float, poll_seconds: float = 2.0) -> None:
        """Return when every resource is ready.

        Raises:
            GaveUpError: the time is over, or a stage failed for good.
        """
        while True:
            resources = self.read()
            for resource in resources:
                self._tell(resource)
            if resources and all(condition(resource, "Ready")["status"] == "True" for resource in resources):
                return
            stuck = [resource for resource in resources if is_stuck(resource)]
            if stuck or time.monotonic() - self._began > seconds:
                what = "\n".join(f"{name_of(resource)}: {story(resource)}" for resource in stuck or resources)
                raise GaveUpError(f"not ready after {time.monotonic() - self._began:.0f} s:\n{what}")
            self._progress(resources)
            time.sleep(poll_seconds)

    def _tell(self, resource: Resource) -> None:
        for stage in resource.get("status", {}).get("stages", []):
            key = (name_of(resource), stage["name"])
            word = stage["state"]
            if stage["state"] in FINISHED or stage.get("reason"):
                word += f" {_figures(stage)}{stage.get('reason', '')} {stage.get('message', '')}".rstrip()
            if self._told.get(key) != word and stage["state"] != "Pending":
                self._say(f"{key[0]:<16} {key[1]:<11} {word}")
            self._told[key] = word

    def _progress(self, resources: Sequence[Resource]) -> None:
        if time.monotonic() - self._last > QUIET_S:
            for resource in resources:
                if condition(resource, "Ready")["status"] != "True":
                    self._say(f"{name_of(resource):<16} {story(resource)}")

    def _say(self, line: str) -> None:
        self._last = time.monotonic()
        minutes, seconds = divmod(int(self._last - self._began), 60)
        self.out(f"{minutes:3d}:{seconds:02d}  {line}\n")


def name_of(resource: Resource) -> str:
    """Return a resource's name."""
    return str(resource["metadata"]["name"])


def condition(resource: Resource, kind: str) -> Resource:
    """Return a condition; an unknown one where the operator has not said anything yet."""
    conditions = resource.get("status", {}).get("conditions", [])
    return next((entry for entry in conditions if entry["type"] == kind), {"status": "Unknown", "message": ""})


def story(resource: Resource) -> str:
    """Return what goes on, as `kubectl get` shows it."""
    return str(condition(resource, "Progressing")["message"])


def is_stuck(resource: Resource) -> bool:
    """Tell whether a stage failed and nothing will be tried again, or the gate said no."""
    stages = resource.get("status", {}).get("stages", [])
    failed = any(stage["state"] == "Failed" and not stage.get("nextAttemptTime") for stage in stages)
    return failed or condition(resource, "GatePassed")["status"] == "False"


def _figures(stage: Resource) -> str:
    seconds = stage.get("metrics", {}).get("seconds")
    return "" if seconds is None else f"in {seconds:.0f} s "
