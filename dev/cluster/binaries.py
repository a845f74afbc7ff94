"""Build the programs of a cluster into the cache: only what is missing, keyed by version.

Kubernetes, CoreDNS and Helm publish Go modules; ``go/*/go.sum`` pins every byte of them. etcd, containerd, runc, the
CNI plugins and iptables come from the distribution.
"""

import os
import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from dev.settings import cache_home

HERE = Path(__file__).resolve().parent
KUBERNETES = "v1.35.4"
COREDNS = "v1.14.0"
HELM = "v4.3.2"
PAUSE = "v1"

ON_THE_MACHINE = {
    "etcd": "etcd-server",
    "openssl": "openssl",
}
"""Program -> Debian package, for an API server."""

FOR_A_NODE = {
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "iptables": "iptables",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
"""Program -> Debian package, for a node beside it."""


class MissingProgramError(RuntimeError):
    """A program is not there; the message says how to get it."""


@dataclass(frozen=True)
class GoProgram:
    """A program that is built from one of the modules in ``go/``."""

    module: str
    package: str
    version: str


_KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl")
GO_PROGRAMS = {
    **{name: GoProgram("kubernetes", f"k8s.io/kubernetes/cmd/{name}", KUBERNETES) for name in _KUBERNETES},
    "coredns": GoProgram("coredns", ".", COREDNS),
    "helm": GoProgram("helm", "helm.sh/helm/v4/cmd/helm", HELM),
}


def path(name: str) -> Path:
    """Where a built program is.

    Raises:
        MissingProgramError: it has not been built.
    """
    file = _place(name)
    if not file.exists():
        raise MissingProgramError(f"{name} is not built: run `make setup`")
    return file


def bin_folders() -> list[Path]:
    """The folders to put on PATH for kubectl and helm."""
    return [_place("kubectl").parent, _place("helm").parent]


def missing_packages(node: bool = True) -> list[str]:  # noqa: FBT001, FBT002 - read as missing_packages(node=True)
    """Return the Debian packages of programs that are not on this machine."""
    programs = {**ON_THE_MACHINE, **(FOR_A_NODE if node else {})}
    return sorted({package for program, package in programs.items() if not find(program)})


def find(program: str) -> str | None:
    """Find a program of the distribution, also where a user's PATH does not look."""
    own = os.environ.get("PATH", os.defpath)  # noqa: TID251 - PATH is what it is about
    return shutil.which(program, path=f"{own}:/usr/sbin:/sbin")


def unbuilt() -> list[str]:
    """Return the names of the programs that ``build`` would build."""
    return [name for name in (*GO_PROGRAMS, "pause") if not _place(name).exists()]


def build() -> list[str]:
    """Build what is missing and return its names.

    Raises:
        MissingProgramError: there is no Go, or no C compiler.
        subprocess.CalledProcessError: a build failed; its messages are on standard error.
    """
    names = unbuilt()
    if "pause" in names:
        _build_pause()
    modules: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if name in GO_PROGRAMS:
            modules[GO_PROGRAMS[name].module].append(name)
    for module, programs in modules.items():
        print(f"building {', '.join(programs)} {GO_PROGRAMS[programs[0]].version}", flush=True)
        for name in programs:
            _build_go(module, name)
    return names


def _build_go(module: str, name: str) -> None:
    if shutil.which("go") is None:
        raise MissingProgramError(
            "Go is missing: install Go 1.26 or newer, or 1.21 and let it fetch that (GOTOOLCHAIN=auto)"
        )
    program = GO_PROGRAMS[name]
    flags = ["-mod=readonly", "-trimpath", "-buildvcs=false"]
    link = "-s -w"
    if module == "kubernetes":  # the version that the API server announces and kubectl compares
        link += f" -X k8s.io/component-base/version.gitVersion={KUBERNETES}"
    own = os.environ  # noqa: TID251 - Go reads its proxy and its caches from it
    with _Arriving(_place(name)) as file:
        command = ["go", "build", *flags, "-ldflags", link, "-o", str(file), program.package]
        subprocess.run(command, cwd=HERE / "go" / module, env={**own, "CGO_ENABLED": "0"}, check=True)


def _build_pause() -> None:
    if shutil.which("gcc") is None:
        raise MissingProgramError("gcc is missing: install the packages gcc and libc6-dev")
    with _Arriving(_place("pause")) as file:
        source = str(HERE / "pause.c")
        subprocess.run(["gcc", "-static", "-O2", "-s", "-o", str(file), source], check=True)


def _place(name: str) -> Path:
    if name == "pause":
        return cache_home() / f"pause-{PAUSE}" / "bin" / name
    program = GO_PROGRAMS[name]
    return cache_home() / f"{program.module}-{program.version}" / "bin" / name


class _Arriving:
    """A file that appears under its name only when it is whole."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._making = file.with_name(f".{file.name}.{os.getpid()}")

    def __enter__(self) -> Path:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        return self._making

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._making.rename(self._file)
        else:
            self._making.unlink(missing_ok=True)
