"""A prefix of an S3 bucket as a store."""

import secrets
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import boto3
from boto3.exceptions import S3UploadFailedError
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    SSLError,
)

from osprey_api.conditions import FailureReason
from osprey_api.stages import StorageLocation
from osprey_runtime import settings
from osprey_runtime.errors import StageError
from osprey_runtime.store import CHUNK_BYTES, Entry, Store, join

_PART_BYTES = 64 << 20
_BATCH = 1000
"""Keys of one DeleteObjects request, by S3's own limit."""
_RESUMPTIONS = 5
"""How often one download goes on after its connection broke."""

_WRONG_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"}
_EXPIRED_KEYS = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_FULL_WORDS = ("quota", "storagefull", "insufficientstorage")
"""In the codes of MinIO, Ceph, Versity, Ozone and others; S3's own buckets have no end."""
_OTHER_REGION = {
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
    "IllegalLocationConstraintException",
    "TemporaryRedirect",
}
_WRITES = {"PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"}
_BUSY = {"SlowDown", "RequestTimeout", "RequestTimeTooSkewed", "Throttling", "ThrottlingException"}
_UNSUPPORTED = {"NotImplemented", "XAmzContentSHA256Mismatch", "MissingContentLength", "UnsupportedArgument"}


class S3Store(Store):
    """A prefix of a bucket.

    Keys come from `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, white space around them removed, since a
    Secret made from a file ends in a newline; where they are unset, from the pod's identity. All other `AWS_…`
    variables of boto3 are obeyed, above all AWS_CA_BUNDLE and AWS_REQUEST_CHECKSUM_CALCULATION.
    """

    def __init__(self, location: StorageLocation) -> None:
        self.uri = location.uri.rstrip("/")
        self._bucket, _, self._prefix = self.uri.removeprefix("s3://").partition("/")
        self._endpoint = location.endpoint or "AWS"
        with self._errors():
            self._client: Any = _client(location, settings.environment())

    def read(self, key: str) -> bytes:
        """Return the content of a small key."""
        return b"".join(self.stream(key))

    def stream(self, key: str) -> Iterator[bytes]:
        """Yield the content of a key in pieces; a broken connection is resumed where it broke."""
        return self._pieces(key)

    def _pieces(self, key: str, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        position, resumptions = start, 0
        last = "" if stop is None else str(stop - 1)
        condition = {} if stop is None else {"Range": f"bytes={start}-{last}"}
        while True:
            try:
                with self._errors(key):
                    try:
                        answer = self._client.get_object(**self._at(key), **condition)
                    except ClientError as error:
                        if stop is not None and position == start and _status(error) == 416:
                            return  # the range begins where the object has ended
                        raise
                    size = position + answer["ContentLength"]
                    # Not `with answer["Body"]`: that gives the stream below it, which does not mind a body cut short.
                    with closing(answer["Body"]) as body:
                        while chunk := body.read(CHUNK_BYTES):
                            position += len(chunk)
                            yield chunk
            except StageError as error:
                if error.reason is not FailureReason.STORAGE_UNAVAILABLE or resumptions == _RESUMPTIONS:
                    raise
                if position == start:
                    raise  # botocore has tried that often enough
                resumptions += 1
            else:
                return
            # If-Match: the rest of another object would make nonsense of the whole.
            condition = {"Range": f"bytes={position}-{last}", "IfMatch": answer["ETag"]}
            if position == size:
                return

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` bytes of a key from byte `start` on; fewer where it ends before."""
        return b"".join(self._pieces(key, start, start + length))

    def write(self, key: str, data: bytes, *, only_if_absent: bool = False) -> bool:
        """Write a small key and return whether it was written."""
        condition = {"IfNoneMatch": "*"} if only_if_absent else {}
        with self._errors(key):
            try:
                self._client.put_object(**self._at(key), Body=data, **condition)
            except ClientError as error:
                # 409: somebody writes the same key right now.
                if only_if_absent and _status(error) in {409, 412}:
                    return False
                raise
        return True

    def upload(self, path: Path, key: str) -> None:
        """Write a file to a key, in parallel parts where it is large."""
        # The client reads parts from the file itself: an open file object would be copied to memory.
        config = TransferConfig(multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=8)
        at = self._at(key)
        with self._errors(key):
            self._client.upload_file(str(path), at["Bucket"], at["Key"], Config=config)

    def list(self, prefix: str) -> Iterator[Entry]:
        """Yield all keys below a folder."""
        folder = join(self._prefix, prefix)
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=f"{folder}/" if folder else ""
        )
        with self._errors(prefix):
            for page in pages:
                for found in page.get("Contents", ()):
                    key = found["Key"]
                    if not key.endswith("/"):  # consoles make such keys to show empty folders
                        yield Entry(key[len(self._prefix) + 1 :] if self._prefix else key, found["Size"])

    def exists(self, key: str) -> bool:
        """Say whether a key is there."""
        with self._errors(key):
            try:
                self._client.head_object(**self._at(key))
            except ClientError as error:
                if _status(error) == 404:
                    return False
                raise
        return True

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys."""
        left = [{"Key": join(self._prefix, key)} for key in keys]
        with self._errors():
            while left:
                batch, left = left[:_BATCH], left[_BATCH:]
                answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": batch, "Quiet": True})
                for failed in answer.get("Errors", ()):
                    raise ClientError({"Error": failed}, "DeleteObjects")

    def forget_uploads(self, prefix: str, *, older_than: timedelta) -> None:
        """Abort the uploads in parts below a folder that began so long ago, by the store's own clock."""
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self._bucket, Prefix=join(self._prefix, prefix) + "/"
        )
        with self._errors(prefix):
            for page in pages:
                now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
                for begun in page.get("Uploads", ()):
                    if begun["Initiated"] < now - older_than:
                        with suppress(self._client.exceptions.NoSuchUpload):  # somebody else did so
                            self._client.abort_multipart_upload(
                                Bucket=self._bucket, Key=begun["Key"], UploadId=begun["UploadId"]
                            )

    def probe(self) -> None:
        """Check that keys can be written, read, listed and deleted here, and that If-None-Match is honoured."""
        any(self.list(".osprey-probe"))
        with self._errors():
            try:
                # Some stores list a missing bucket as empty, and make it when it is written to.
                self._client.head_bucket(Bucket=self._bucket)
            except ClientError as error:
                if _status(error) == 404:
                    raise self._no_bucket() from error
                raise
        key = f".osprey-probe-{secrets.token_hex(8)}"
        self.write(key, b"", only_if_absent=True)
        try:
            twice = self.write(key, b"", only_if_absent=True)
            self.read(key)
        finally:
            self.delete([key])
        if twice:
            raise StageError(
                FailureReason.STORAGE_UNSUPPORTED,
                f"the S3 store at {self._endpoint} ignores If-None-Match, so two attempts could overwrite each "
                "other: use a store that honours it, such as AWS S3, MinIO, Ceph from Squid on, or SeaweedFS",
            )

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": join(self._prefix, key)}

    @contextmanager
    def _errors(self, key: str = "") -> Iterator[None]:
        """Raise the client's errors as ours."""
        try:
            yield
        except S3UploadFailedError as failed:
            cause = failed.__context__  # boto3 hides the answer's code
            if isinstance(cause, ClientError):
                raise self._refusal(cause, key) from failed
            raise self._error(FailureReason.STORAGE_UNAVAILABLE, f"failed: {failed}", "it is tried again") from failed
        except ClientError as refusal:
            raise self._refusal(refusal, key) from refusal
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise StageError(
                FailureReason.STORAGE_ACCESS_DENIED,
                f"no keys for s3://{self._bucket}: name a Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in "
                "storage.credentialsSecret, or give the pods' service account access",
            ) from error
        except SSLError as error:
            if "certificate" not in str(error).lower():
                raise self._no_answer(error) from error
            raise self._error(
                FailureReason.INVALID_CONFIG,
                f"shows a certificate that is not trusted ({_line(error)})",
                "mount its CA by spec.job.template and set AWS_CA_BUNDLE to the path of the file",
            ) from error
        except (ParamValidationError, ValueError) as error:
            raise self._error(
                FailureReason.INVALID_CONFIG, f"can't be asked: {_line(error)}", "correct the URI or the endpoint"
            ) from error
        except BotoCoreError as error:
            raise self._no_answer(error) from error

    def _error(self, reason: FailureReason, what: str, fix: str) -> StageError:
        return StageError(reason, f"the S3 store at {self._endpoint} (s3://{self._bucket}) {what}: {fix}")

    def _no_answer(self, error: Exception) -> StageError:
        return self._error(
            FailureReason.STORAGE_UNAVAILABLE,
            f"does not answer ({_line(error)})",
            "check the endpoint and the network; it is tried again",
        )

    def _no_bucket(self) -> StageError:
        return StageError(
            FailureReason.STORAGE_NOT_FOUND,
            f"bucket {self._bucket!r} does not exist at {self._endpoint}: create it, or correct the URI",
        )

    def _refusal(self, error: ClientError, key: str) -> Exception:
        """Return what an answer of the store means."""
        code, status = str(error.response.get("Error", {}).get("Code", "")), _status(error)
        answer = f"{status} {code}".strip()
        if code == "NoSuchBucket":
            return self._no_bucket()
        if code == "NoSuchKey" or status == 404:
            return FileNotFoundError(f"{self.uri}/{key}")
        if status == 507 or (status != 429 and any(word in code.lower() for word in _FULL_WORDS)):
            return self._error(
                FailureReason.STORAGE_FULL, f"is full ({answer})", "free space or raise the quota; it is tried again"
            )
        if code in _OTHER_REGION or status == 301:
            return self._error(
                FailureReason.INVALID_CONFIG, f"has the bucket in another region ({answer})", "set storage.region to it"
            )
        if status == 412:
            return self._error(FailureReason.STORAGE_UNAVAILABLE, f"has another {key!r} by now", "it is tried again")
        if code in _BUSY or (status >= 500 and status != 501) or status == 429:
            fix = "it is tried again"
            if error.operation_name in _WRITES and status == 500:
                fix = (
                    f"{fix}; where only writing fails, look for a full disk or quota, of which some stores say no more"
                )
            return self._error(FailureReason.STORAGE_UNAVAILABLE, f"can't answer ({answer})", fix)
        if code in _WRONG_KEYS:
            return self._error(
                FailureReason.STORAGE_ACCESS_DENIED,
                f"does not know the keys ({answer})",
                "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the Secret",
            )
        if code in _EXPIRED_KEYS:
            return self._error(
                FailureReason.STORAGE_ACCESS_DENIED, f"says that the keys expired ({answer})", "renew the Secret"
            )
        if status in {401, 403} or code in {"AccessDenied", "AllAccessDisabled"}:
            return self._error(
                FailureReason.STORAGE_ACCESS_DENIED,
                f"denies access to {key or 'its keys'!r} ({answer})",
                "allow these keys, or this service account, to get, put, list and delete there",
            )
        if code in _UNSUPPORTED or status in {411, 501}:
            return self._error(
                FailureReason.STORAGE_UNSUPPORTED,
                f"does not support what is asked ({answer}: {_line(error)})",
                "leave AWS_REQUEST_CHECKSUM_CALCULATION at when_required, or use another store",
            )
        return self._error(
            FailureReason.STORAGE_UNSUPPORTED, f"refuses a request ({answer}: {_line(error)})", "use another store"
        )


def _client(location: StorageLocation, env: Mapping[str, str]) -> Any:
    bundle = env.get("AWS_CA_BUNDLE")
    if bundle and not Path(bundle).is_file():
        raise StageError(
            FailureReason.INVALID_CONFIG,
            f"AWS_CA_BUNDLE names {bundle[:200]!r}, and there is no such file: mount one and name its path",
        )
    keys: dict[str, Any] = {
        "aws_access_key_id": env.get("AWS_ACCESS_KEY_ID", "").strip() or None,
        "aws_secret_access_key": env.get("AWS_SECRET_ACCESS_KEY", "").strip() or None,
        "aws_session_token": env.get("AWS_SESSION_TOKEN", "").strip() or None,
    }
    session = boto3.session.Session(
        **keys, region_name=location.region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1"
    )
    # Checksum trailers are refused by older stores, and files carry a SHA-256 of ours anyway.
    defaults: dict[str, Any] = {
        "AWS_REQUEST_CHECKSUM_CALCULATION": {"request_checksum_calculation": "when_required"},
        "AWS_RESPONSE_CHECKSUM_VALIDATION": {"response_checksum_validation": "when_required"},
    }
    options = [values for variable, values in defaults.items() if variable not in env]
    retries: Any = {"mode": "standard"} | ({} if "AWS_MAX_ATTEMPTS" in env else {"total_max_attempts": 5})
    config = Config(
        signature_version="s3v4",
        connect_timeout=10,
        read_timeout=60,
        retries=retries,
        max_pool_connections=32,
        s3={"addressing_style": "path" if location.endpoint else "auto"},
        **ChainMap(*options),
    )
    return session.client("s3", endpoint_url=location.endpoint, config=config)


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _line(error: Exception) -> str:
    """Return an error's text as one line."""
    return " ".join(str(error).split())
