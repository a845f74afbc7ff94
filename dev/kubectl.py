"""kubectl and Helm on a cluster, as a user runs them."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dev.cluster.binaries import bin_folders


class CommandError(RuntimeError):
    """kubectl or Helm refused; the message is its own."""


@dataclass(frozen=True)
class Kubectl:
    """A cluster, as the commands see it.

    Attributes:
        variables: in addition to this process's own, such as KUBECONFIG and PATH.
    """

    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a command. Where a machine has no kubectl or Helm, those of `make setup` are found."""
        variables = {**os.environ, **self.variables}  # noqa: TID251 - kubectl and Helm want HOME and the like
        folders = [variables.get("PATH", os.defpath), *map(str, bin_folders())]
        return {**variables, "PATH": os.pathsep.join(folders)}

    def run(self, *words: str | Path, text: str | None = None) -> str:
        """Run a command with `text` on its standard input and return what it prints.

        Raises:
            CommandError: it fails.
        """
        command = [str(word) for word in words]
        try:
            done = subprocess.run(
                command, input=text, capture_output=True, text=True, check=False, env=self.environment
            )
        except FileNotFoundError as error:
            raise CommandError(f"{command[0]} is not installed: run `make setup`, or install it") from error
        if done.returncode:
            raise CommandError(f"{' '.join(command[:4])} ...: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def read(self, *words: str) -> Any:
        """Return what `kubectl get ... -o json` says."""
        return json.loads(self.run("kubectl", "get", *words, "-o", "json"))

    def apply(self, *manifests: Mapping[str, Any]) -> None:
        """Apply objects."""
        items = {"apiVersion": "v1", "kind": "List", "items": manifests}
        self.run("kubectl", "apply", "-f", "-", text=json.dumps(items))

    def namespace(self, name: str) -> None:
        """Make a namespace that enforces the `restricted` pod security standard."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})

    def secret(self, namespace: str, name: str, access_key: str, secret_key: str) -> None:
        """Make or replace a Secret with S3 keys."""
        keys = {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}
        metadata = {"name": name, "namespace": namespace}
        self.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": keys})

    def install(self, chart: Path, namespace: str, *values: Path) -> None:
        """Install the operator's chart, or upgrade it, and return when it works."""
        files = [word for path in values for word in ("--values", path)]
        self.run(
            *("helm", "upgrade", "--install", "osprey", chart, "--namespace", namespace),
            *files,
            *("--wait", "--timeout", "2m"),
        )
