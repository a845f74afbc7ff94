"""``make setup``: bring in what development needs, only what is missing, and say exactly what could not be.

It runs with any Python 3.11 or newer and the standard library, before the virtual environment exists.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dev import models
from dev.cluster import binaries
from dev.settings import REPOSITORY, REQUIREMENTS
from dev.uv import find_uv

PYTHON = "3.11"
ENVIRONMENT = REPOSITORY / ".venv"
PACKAGES = ("crds", "runtime", "operator", "trainer_image", "serving_image")

PROBES = {
    **{package: (program,) for program, package in (binaries.ON_THE_MACHINE | binaries.FOR_A_NODE).items()},
    "gcc": ("gcc",),
    "libc6-dev": ("/usr/include/stdio.h",),
    "prometheus": ("prometheus",),
    "python3.11-doc": ("/usr/share/doc/python3.11/html", "/usr/share/doc/python3.11-doc/html"),
    "dict-foldoc": ("/usr/share/dictd/foldoc.dict.dz",),
}
"""Debian package -> programs or paths, any of which shows that what it is for is there."""

SERVICES = {"etcd-server": "etcd", "containerd": "containerd", "prometheus": "prometheus"}
"""Debian package -> the service that it would start with the machine."""


@dataclass(frozen=True)
class Problem:
    """Something that this machine can't bring in by itself."""

    what: str
    remedy: str


def missing_packages() -> list[str]:
    """Return the Debian packages whose content is not on this machine, wherever it may come from."""
    return sorted(
        package
        for package, probes in PROBES.items()
        if not any(binaries.find(probe) or Path(probe).exists() for probe in probes)
    )


def install_packages(packages: Sequence[str]) -> Problem | None:
    """Install Debian packages without starting the services in them."""
    if not packages:
        return None
    command = f"apt-get install --no-install-recommends {' '.join(packages)}"
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return Problem(f"Debian packages {' '.join(packages)}", f"as root: {command}; or their like elsewhere")
    print(f"installing {' '.join(packages)}", flush=True)
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}  # noqa: TID251 - apt needs its settings
    subprocess.run(["apt-get", "update", "-q"], check=True, env=quiet)
    with _no_service_starts():
        subprocess.run([*command.split(), "-q", "--yes"], check=True, env=quiet)
    services = [SERVICES[package] for package in packages if package in SERVICES]
    if services and shutil.which("systemctl"):
        # They came for their programs. Without systemd running this only removes its links.
        subprocess.run(["systemctl", "disable", *services], check=False)
    left = missing_packages()
    return Problem(f"what the packages {' '.join(left)} should have brought", f"look at: {command}") if left else None


@contextlib.contextmanager
def _no_service_starts() -> Iterator[None]:
    """Tell Debian's package scripts not to start services; a machine that says so already is left alone."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def install_environment(uv: Path) -> None:
    """Make .venv hold exactly the locked packages and our own, unless it does already."""
    inputs = [REQUIREMENTS / "dev.lock", *(REPOSITORY / package / "pyproject.toml" for package in PACKAGES)]
    wanted = " ".join(_digest(file) for file in inputs)
    stamp = ENVIRONMENT / "installed-from"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([uv, "venv", "--python", PYTHON, ENVIRONMENT], check=True)
    print("installing the locked environment: some minutes the first time", flush=True)
    stamp.unlink(missing_ok=True)
    at = ["--python", str(python)]
    locked = ["--require-hashes", "--compile-bytecode", str(inputs[0])]  # pods mount it read-only
    subprocess.run([uv, "pip", "sync", *at, *locked], check=True)
    own = [word for package in PACKAGES for word in ("--editable", str(REPOSITORY / package))]
    subprocess.run([uv, "pip", "install", *at, "--no-deps", "--no-build-isolation", *own], check=True)
    stamp.write_text(wanted)


def build_programs(uses_own_cluster: bool) -> Problem | None:  # noqa: FBT001 - one caller, by name
    """Build the programs of a cluster, or make sure of kubectl and Helm where another cluster is used."""
    if not uses_own_cluster and all(shutil.which(program) for program in ("kubectl", "helm")):
        return None
    try:
        binaries.build()
    except binaries.MissingProgramError as error:
        remedy = "install it and run `make setup` again"
        return Problem(f"Kubernetes: {error}", remedy if uses_own_cluster else f"{remedy}, or bring kubectl and helm")
    return None


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> int:
    """Bring in everything that can be; return 1 if something is still missing."""
    uses_own_cluster = not os.environ.get("KUBECONFIG")  # noqa: TID251 - the choice that users make
    uv = find_uv()
    packages = missing_packages()
    if not uses_own_cluster:
        packages = [package for package in packages if package not in binaries.FOR_A_NODE.values()]
    problems = [install_packages(packages)]
    install_environment(uv)
    problems.append(build_programs(uses_own_cluster=uses_own_cluster))
    if not models.is_ready(models.folder()):
        subprocess.run([ENVIRONMENT / "bin" / "python", "-m", "dev.models"], cwd=REPOSITORY, check=True)
    real = [problem for problem in problems if problem]
    for problem in real:
        print(f"missing: {problem.what}\n   {problem.remedy}", file=sys.stderr)
    if real and uses_own_cluster:
        print("An existing cluster will do as well: docs/demo.md says how", file=sys.stderr)
    return 1 if real else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {error}")
