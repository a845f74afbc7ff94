"""A checkpoint of one number of ranks, made readable for another one by DeepSpeed's own converter."""

import io
import logging
import shutil
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from deepspeed.checkpoint import ds_to_universal

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError

log = logging.getLogger(__name__)

_COPIES = 2
"""Of the checkpoint, that exist at a time while it is converted: the shards cut by tensor, and the tensors."""


def convert(folder: Path, out: Path, *, tag: str) -> None:
    """Writes what `Engine.save` wrote to `folder`, under any ZeRO stage but 0, as a universal checkpoint to `out`.

    One process does it, and takes one shard into memory at a time.

    Raises:
        StageError: OUT_OF_DISK before anything is written.
    """
    shutil.rmtree(out, ignore_errors=True)  # of a process that was killed meanwhile
    needed = _COPIES * sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StageError(
            FailureReason.OUT_OF_DISK,
            f"Going on with another number of ranks takes {needed:,} bytes to convert the checkpoint, and {free:,} are "
            "free: mount a larger scratch volume, or run as many ranks as before.",
        )
    out.mkdir()
    said = io.StringIO()
    # It prints its steps and draws bars.
    with redirect_stdout(said), redirect_stderr(said):
        ds_to_universal.main(
            Namespace(
                input_folder=str(folder / tag),
                output_folder=str(out / tag),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,  # a note that no tensor needs special care
            )
        )
    log.info("the checkpoint was converted for another number of ranks")
