"""Ending the process when SGLang must not go on."""

import os
import sys
from typing import NoReturn

WRONG_INPUT = 64
"""Exit code for input that no retry makes right."""


def stop(sentence: str) -> NoReturn:
    """Say what is wrong and end the process at once.

    SGLang logs and swallows every exception of a plugin, and then serves without it: an exception would
    turn a wrong drafter into a slow one.
    """
    print(f"osprey plugin: {sentence}", file=sys.stderr, flush=True)  # noqa: T201  the log may not be set up
    os._exit(WRONG_INPUT)
