"""The serving image has no torch, and only the plugin runs inside SGLang."""

import subprocess
import sys

IMPORT_ALL = """
import importlib, pkgutil, sys
for name in ("torch", "sglang"):
    sys.modules[name] = None  # an import of it raises
import osprey_serving
names = [module.name for module in pkgutil.walk_packages(osprey_serving.__path__, "osprey_serving.")]
names = [name for name in names if not name.startswith("osprey_serving.plugin.models")]
for name in names:
    importlib.import_module(name)
import transformers  # what renders prompts, imported on first use
print(*names)
"""


def test_nothing_outside_the_plugin_needs_torch_or_sglang():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"osprey_serving.client", "osprey_serving.stages.evaluate", "osprey_serving.sync"} <= set(
        done.stdout.split()
    )
