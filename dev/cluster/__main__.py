"""Command line of the local cluster."""

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from dev import processes
from dev.cluster import binaries, cluster, volumes
from dev.cluster.api import ApiError
from dev.cluster.cluster import Cluster, ClusterError


def parser() -> argparse.ArgumentParser:
    """Describe the commands."""
    root = argparse.ArgumentParser(prog="python -m dev.cluster", description=__doc__)
    commands = root.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build what is missing into the cache")
    for name, text in {
        "up": "start the cluster, unless it is up",
        "down": "stop it and remove everything that it made",
        "status": "say what runs; exit 1 if it is not up",
        "env": "print what to evaluate in a shell to use it with kubectl and Helm",
        "image": "load an OCI image archive from standard input",
        "volumes": "bind this machine's programs in a namespace and print the pod template that mounts them",
    }.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("--name", default="dev", help="name of the cluster (default: dev)")
        if name in {"up", "status"}:
            command.add_argument("--no-node", action="store_true", help="API server and controllers only")
        if name == "volumes":
            command.add_argument("namespace")
            command.add_argument("extra", nargs="*", metavar="NAME=PATH", help="more folders to mount")
        if name == "down":
            command.add_argument("--all", action="store_true", help="every cluster, and the servers beside them")
    return root


def main(words: list[str]) -> int:
    """Run one command and return its exit status."""
    asked = parser().parse_args(words)
    if asked.command == "build":
        binaries.build()
        return 0
    one = Cluster(asked.name, has_node=not getattr(asked, "no_node", False))
    match asked.command:
        case "up":
            begin = time.monotonic()
            one.up()
            print(f"{one.name} is up after {time.monotonic() - begin:.1f} s: {one.server}")
            print(f'eval "$({sys.executable} -m dev.cluster env --name {one.name})"')
        case "down" if asked.all:
            cluster.down_all()
        case "down":
            one.down()
        case "env":
            for variable, value in one.environment().items():
                print(f'export {variable}="{value}"')
        case "image":
            one.load_image(sys.stdin.buffer.read())
        case "volumes":
            extra = {name: Path(path) for name, _, path in (word.partition("=") for word in asked.extra)}
            volumes.provide(one.api(), asked.namespace, extra)
            print(json.dumps(volumes.pod_template(extra), indent=1))
        case _:
            print("\n".join(one.leftovers()) or f"nothing of cluster {one.name} is on this machine")
            return 0 if one.is_up() else 1
    return 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # `up` undoes what it has done, also where a script ignores Ctrl-C
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:]))
    except (ClusterError, binaries.MissingProgramError, processes.NotReadyError, ApiError) as error:
        sys.exit(f"error: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {error}\n{error.stderr or ''}")
