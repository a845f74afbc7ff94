"""Canonical bytes of a value, and the SHA-256 that addresses a stage's artifact by all that shaped it."""

import hashlib
import json
from collections.abc import Mapping

from pydantic import JsonValue


def canonical_json(value: JsonValue) -> bytes:
    """Return the one spelling of a JSON value: sorted keys, no spaces, UTF-8.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot say.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256(value: JsonValue) -> str:
    """Return the hex SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def fingerprint(*, stage: str, code_version: int, config: JsonValue, inputs: Mapping[str, str]) -> str:
    """Return the 64 hex digits that name a stage's artifact.

    Args:
        stage: the stage's name.
        code_version: raised by hand when the stage's code gives another result for the same config.
        config: the fields that change the result, and only those.
        inputs: role of each input artifact -> its content digest.
    """
    return sha256({"stage": stage, "codeVersion": code_version, "config": config, "inputs": dict(inputs)})
