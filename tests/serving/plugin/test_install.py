"""The folder that an init container makes for a stock SGLang."""

import base64
import hashlib
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import version

import pytest

from osprey_serving.plugin_install import install

# -S: no .pth file is read, so this repository's own packages are not importable, as in a stock image.
FIND = """
from importlib.metadata import entry_points, version
(entry,) = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "osprey"]
entry.load()
import osprey_serving, sys
print(osprey_serving.__file__, version("osprey-serving"), "osprey_runtime" in sys.modules)
"""
LOAD = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.plugins.hook_registry import HookRegistry
print(ModelRegistry.models["Qwen3ForCausalLMEagle3"].__module__)
print(*sorted(target.rpartition(".")[2] for target in HookRegistry._patched))
"""


@pytest.fixture
def folder(tmp_path):
    install(tmp_path)
    return tmp_path


def python(code, *path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}  # noqa: TID251
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_plugin_is_found_with_nothing_else_on_the_path(folder):
    result = python(FIND, folder)
    assert result.stdout.split() == [
        str(folder / "osprey_serving" / "__init__.py"),
        version("osprey-serving"),
        "False",
    ], result.stderr


def test_sglang_loads_it(folder):
    result = python(LOAD, folder, sysconfig.get_path("purelib"))
    module, *hooked = result.stdout.split()
    assert module == "osprey_serving.plugin.models.drafter", result.stderr
    assert {
        "resolve_once",
        "get_internal_state",
        "update_weights_from_disk",
        "set_eagle3_layers_to_capture",
        "_can_reuse_text_only_prompt_ids",
    } <= set(hooked)


def test_an_unknown_sglang_is_refused(folder, tmp_path):
    info = tmp_path / "other" / "sglang-0.6.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.6.0\n")
    result = python("import osprey_serving.plugin as p; p.register()", folder, info.parent)
    assert result.returncode == 64
    assert result.stderr.startswith("osprey plugin: SGLang is 0.6.0; this plugin (osprey-serving")


def test_an_sglang_without_metadata_is_refused(folder):
    """A checkout on PYTHONPATH has none; SGLang would swallow the error and serve without the plugin."""
    result = python("import osprey_serving.plugin as p; p.register()", folder)
    assert result.returncode == 64
    assert "osprey plugin: cannot be set up in SGLang of an unknown version: PackageNotFoundError" in result.stderr


def test_a_hook_without_a_target_is_refused(folder, tmp_path):
    """SGLang would only log it."""
    info = tmp_path / "other" / "sglang-0.5.23.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    result = python("import osprey_serving.plugin as p; p.register()", folder, info.parent)
    assert result.returncode == 64
    assert "osprey plugin: cannot be set up in SGLang 0.5.23: ModuleNotFoundError" in result.stderr


def test_record_names_every_file_with_its_digest(folder):
    (info,) = folder.glob("*.dist-info")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    rows = [line.split(",") for line in (info / "RECORD").read_text().splitlines()]
    assert {row[0] for row in rows} == files
    for name, digest, size in rows:
        if name.endswith("RECORD"):
            continue
        content = (folder / name).read_bytes()
        expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert (digest, size) == (f"sha256={expected}", str(len(content)))


def test_installing_again_replaces_what_was_there(folder):
    (folder / "osprey_serving" / "plugin" / "old.py").write_text("")
    (folder / "osprey_serving-0.0.1.dist-info").mkdir()
    before = install(folder)
    assert not (folder / "osprey_serving" / "plugin" / "old.py").exists()
    assert list(folder.glob("*.dist-info")) == [before]
