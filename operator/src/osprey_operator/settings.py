"""Settings from the environment; the chart's values become these variables."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from osprey_api.common import Storage
from osprey_operator.state import Settings

T = TypeVar("T")


class SettingsError(Exception):
    """A variable holds what cannot be used; the message names it."""


@dataclass(frozen=True)
class Ports:
    """Where the operator itself is asked."""

    metrics: int = 8080
    health: int = 8081


def from_environment(environment: Mapping[str, str]) -> Settings:
    """Return the settings that variables `OSPREY_…` make; an unset or empty one leaves the default.

    Raises:
        SettingsError: a variable cannot be used.
    """
    read = _Reader(environment)
    default = Settings()
    namespaces = read("NAMESPACES", str, "")
    return Settings(
        namespaces=tuple(sorted({name.strip() for name in namespaces.split(",")} - {""})),
        trainer_image=read("TRAINER_IMAGE", str, default.trainer_image),
        serving_image=read("SERVING_IMAGE", str, default.serving_image),
        sglang_image=read("SGLANG_IMAGE", str, default.sglang_image),
        sglang_version=read("SGLANG_VERSION", str, default.sglang_version),
        image_pull_policy=read("IMAGE_PULL_POLICY", str, default.image_pull_policy),
        pod_template=read("POD_TEMPLATE", _object, default.pod_template),
        storage=read("STORAGE", _storage, default.storage),
        workers=read("WORKERS", _positive_int, default.workers),
        poll_seconds=read("POLL_SECONDS", _positive, default.poll_seconds),
        resync_seconds=read("RESYNC_SECONDS", _positive, default.resync_seconds),
        retry_base_seconds=read("RETRY_BASE_SECONDS", _positive, default.retry_base_seconds),
        retry_max_seconds=read("RETRY_MAX_SECONDS", _positive, default.retry_max_seconds),
        settled_seconds=read("SETTLED_SECONDS", _positive, default.settled_seconds),
    )


def ports(environment: Mapping[str, str]) -> Ports:
    """Return the operator's own ports, from `OSPREY_METRICS_PORT` and `OSPREY_HEALTH_PORT`.

    Raises:
        SettingsError: a variable cannot be used.
    """
    read = _Reader(environment)
    default = Ports()
    return Ports(
        metrics=read("METRICS_PORT", _port, default.metrics), health=read("HEALTH_PORT", _port, default.health)
    )


@dataclass(frozen=True)
class _Reader:
    environment: Mapping[str, str]

    def __call__(self, name: str, parse: Callable[[str], T], default: T) -> T:
        variable = f"OSPREY_{name}"
        text = self.environment.get(variable, "").strip()
        if not text:
            return default
        try:
            return parse(text)
        except (ValueError, ValidationError) as error:
            raise SettingsError(f"{variable}={text!r}: {error}") from error


def _object(text: str) -> Mapping[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("write a JSON object")  # noqa: TRY004 - one error for whatever the variable holds
    return value


def _storage(text: str) -> Storage:
    return Storage.model_validate_json(text)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError("write a number above 0")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("write a whole number above 0")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise ValueError("write a port, 0 to 65535")
    return value
