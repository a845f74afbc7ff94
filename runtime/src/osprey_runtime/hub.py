"""The Hugging Face hub: its errors as ours. Its libraries are imported only where a source asks for them."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from osprey_api.conditions import FailureReason
from osprey_runtime.errors import StageError


@contextmanager
def errors(uri: str) -> Iterator[None]:
    """Raise what the hub's libraries raise as `StageError`.

    Raises:
        StageError: SOURCE_NOT_FOUND, no such repository, revision, configuration, split or file;
            SOURCE_ACCESS_DENIED, it is gated or private; HUB_UNAVAILABLE, it does not answer.
    """
    import httpx  # noqa: PLC0415 - comes with huggingface_hub
    from huggingface_hub import errors as hub  # noqa: PLC0415

    try:
        yield
    except hub.GatedRepoError as error:
        raise StageError(
            FailureReason.SOURCE_ACCESS_DENIED,
            f"{uri} is gated: accept its terms on the hub, and put a token with access as HF_TOKEN into the Secret of "
            "hubCredentialsSecret",
        ) from error
    except hub.RepositoryNotFoundError as error:
        # The hub says the same of a private repository to those without access.
        raise StageError(
            FailureReason.SOURCE_NOT_FOUND,
            f"{uri} does not exist, or is private: correct the URI, or set hubCredentialsSecret",
        ) from error
    except (hub.RevisionNotFoundError, hub.EntryNotFoundError) as error:
        raise StageError(FailureReason.SOURCE_NOT_FOUND, f"{uri}: {_line(error)}") from error
    except hub.HFValidationError as error:
        raise StageError(FailureReason.INVALID_CONFIG, f"{uri}: {_line(error)}") from error
    except hub.HfHubHTTPError as error:
        if error.response.status_code in {401, 403}:
            raise StageError(
                FailureReason.SOURCE_ACCESS_DENIED, f"the hub refuses {uri}: renew HF_TOKEN in its Secret"
            ) from error
        raise _unavailable(uri, error) from error
    except (httpx.HTTPError, hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, OSError) as error:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise  # our own disk
        raise _unavailable(uri, error) from error


def _unavailable(uri: str, error: Exception) -> StageError:
    return StageError(
        FailureReason.HUB_UNAVAILABLE,
        f"the hub does not give {uri}: {_line(error)}; it is tried again. Without access to the hub, put the content "
        "into S3 or on a claim and name it by s3:// or pvc://",
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
