import os
import re
import subprocess
import sys

import pytest

from dev import setup
from dev.cluster import binaries
from dev.settings import REPOSITORY, REQUIREMENTS


def dev_cluster(*words, **env):
    """Run the command with variables of its own on a machine without Go or a C compiler."""
    command = [sys.executable, "-m", "dev.cluster", *words]
    return subprocess.run(command, cwd=REPOSITORY, check=False, capture_output=True, text=True, env=env)


def test_a_machine_without_a_compiler_is_told_what_to_install(tmp_path):
    done = dev_cluster("build", OSPREY_CACHE=str(tmp_path), PATH=str(tmp_path))

    assert done.returncode == 1
    assert "install the packages gcc and libc6-dev" in done.stderr


def test_a_machine_without_go_is_told_what_to_install(tmp_path):
    (tmp_path / "gcc").symlink_to("/usr/bin/gcc")
    (tmp_path / "as").symlink_to("/usr/bin/as")
    (tmp_path / "ld").symlink_to("/usr/bin/ld")
    done = dev_cluster("build", OSPREY_CACHE=str(tmp_path), PATH=str(tmp_path))

    assert done.returncode == 1
    assert re.search(r"install Go \S+ or newer", done.stderr)
    assert [file.name for file in tmp_path.rglob("pause*") if file.is_file()] == ["pause"]  # whole, and kept


def test_up_before_a_build_says_what_to_run(tmp_path):
    done = dev_cluster("up", OSPREY_CACHE=str(tmp_path), PATH=os.defpath)

    assert done.returncode == 1
    assert "kubelet" in done.stderr
    assert "run `make setup`" in done.stderr


def test_what_is_built_is_not_built_again():
    assert binaries.build() == []


def test_a_missing_program_names_its_package(monkeypatch):
    monkeypatch.setitem(setup.PROBES, "some-package", ("no-such-program", "/no/such/path"))

    assert setup.missing_packages() == ["some-package"]


def test_without_root_the_packages_to_install_are_named(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    problem = setup.install_packages(["containerd", "runc"])

    assert "as root: apt-get install --no-install-recommends containerd runc" in problem.remedy


def test_nothing_is_installed_where_nothing_is_missing():
    assert setup.install_packages([]) is None


@pytest.mark.parametrize("name", ["dev", "operator", "trainer", "serving", "demo-model", "uv"])
def test_locks_pin_every_package_by_hash_and_name_no_index(name):
    text = (REQUIREMENTS / f"{name}.lock").read_text()
    pins = re.findall(r"^[a-z0-9][^\n]*(?:\n {4}--hash=\S+(?: \\)?)*", text, re.MULTILINE)

    assert pins
    assert all("==" in pin and "--hash=sha256:" in pin for pin in pins)
    assert "://" not in text
    assert "index-url" not in text


@pytest.mark.parametrize("name", ["operator", "serving"])
def test_small_images_have_no_torch(name):
    text = (REQUIREMENTS / f"{name}.lock").read_text()

    assert not re.search(r"^(torch|nvidia-\S+|triton)==", text, re.MULTILINE)


def test_images_use_the_versions_that_are_tested():
    def versions(name):
        return set(re.findall(r"^([a-z0-9-]+==[^\s;]+)", (REQUIREMENTS / f"{name}.lock").read_text(), re.MULTILINE))

    assert versions("operator") | versions("trainer") | versions("serving") <= versions("dev")
