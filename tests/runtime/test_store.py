"""Both kinds of store behave alike, and S3's errors say what to do."""

import errno
import http.server
import os
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from dev.network import free_ports
from osprey_api.conditions import FailureReason
from osprey_api.stages import StorageLocation
from osprey_runtime.errors import StageError
from osprey_runtime.store import Entry, content_of, open_store


def test_what_is_written_is_read(store, tmp_path):
    assert store.write("a/one.json", b"{}")
    (tmp_path / "file").write_bytes(os.urandom(3_000_000))
    store.upload(tmp_path / "file", "a/b/two")

    assert store.read("a/one.json") == b"{}"
    content = (tmp_path / "file").read_bytes()
    for start, length in ((0, 1), (17, 2_000_000), (2_999_990, 10), (2_999_990, 100), (3_000_000, 1), (4_000_000, 9)):
        assert store.read_range("a/b/two", start, length) == content[start : start + length]
    assert store.download("a/b/two", tmp_path / "new" / "back") == content_of(tmp_path / "file")
    assert (tmp_path / "new" / "back").read_bytes() == (tmp_path / "file").read_bytes()
    assert sorted(store.list(""), key=lambda entry: entry.key) == [Entry("a/b/two", 3_000_000), Entry("a/one.json", 2)]
    assert list(store.list("a/b")) == [Entry("a/b/two", 3_000_000)]
    assert list(store.list("a/on")) == []  # a folder and no beginning of a name
    assert store.exists("a/one.json")
    assert not store.exists("a")


def test_files_of_a_folder_can_be_read_by_whom_the_umask_lets(local_location, tmp_path):
    (tmp_path / "file").touch()
    open_store(local_location).write("key", b"x")
    assert (tmp_path / "storage" / "key").stat().st_mode == (tmp_path / "file").stat().st_mode


def test_deleting_is_idempotent(store):
    store.write("a/b", b"x")
    store.delete(["a/b", "a/b", "c"])
    store.delete([])
    assert list(store.list("")) == []


def test_a_missing_key_is_a_missing_file(store, tmp_path):
    store.write("other", b"")
    with pytest.raises(FileNotFoundError):
        store.read("missing")
    with pytest.raises(FileNotFoundError):
        store.download("missing", tmp_path / "file")


def test_writing_again_replaces_unless_asked_not_to(store):
    assert store.write("key", b"1", only_if_absent=True)
    assert not store.write("key", b"2", only_if_absent=True)
    assert store.read("key") == b"1"
    assert store.write("key", b"3")
    assert store.read("key") == b"3"


def test_of_many_writers_one_wins(store):
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda n: store.write("race", b"%d" % n, only_if_absent=True), range(16)))
    assert won.count(True) == 1
    assert store.read("race") == b"%d" % won.index(True)


def test_probe_leaves_nothing(store):
    store.probe()
    assert list(store.list("")) == []


def test_keys_stay_in_the_local_folder(tmp_path):
    store = open_store(StorageLocation(uri=f"file://{tmp_path}/storage"))
    with pytest.raises(ValueError, match="leaves its store"):
        store.read("../secret")


def test_unknown_kind_of_storage():
    with pytest.raises(StageError) as caught:
        open_store(StorageLocation(uri="gs://bucket/prefix"))
    assert caught.value.reason is FailureReason.INVALID_CONFIG


def test_full_disk_of_a_local_store(tmp_path):
    # /dev/full is a device whose every write fails as on a full disk.
    store = open_store(StorageLocation(uri=f"file://{tmp_path}"))
    store.write("key", b"content")
    Path(tmp_path, "full").symlink_to("/dev/full")
    with pytest.raises(StageError) as caught:
        store.download("key", tmp_path / "full")
    assert caught.value.reason is FailureReason.OUT_OF_DISK
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC


def test_large_file_goes_in_parts(s3_location, s3, tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(150 << 20)
    store = open_store(s3_location)
    store.upload(path, "large")
    bucket, _, prefix = s3_location.uri.removeprefix("s3://").partition("/")
    etag = s3.client().head_object(Bucket=bucket, Key=f"{prefix}/large")["ETag"]
    assert etag.strip('"').endswith("-3")  # the mark of a multipart upload in three parts
    assert store.download("large", tmp_path / "back") == content_of(path)


def test_more_keys_than_fit_a_page(s3_location):
    store = open_store(s3_location)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: store.write(f"many/{n}", b""), range(1005)))
    entries = list(store.list("many"))
    assert len(entries) == 1005
    store.delete(entry.key for entry in entries)
    assert list(store.list("many")) == []


# ------------------------------------------------------------------------------------------ what goes wrong


def reason_of(location: StorageLocation) -> StageError:
    with pytest.raises(StageError) as caught:
        open_store(location).probe()
    return caught.value


def test_keys_from_a_secret_that_ends_in_a_newline(s3_location, s3, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f" {s3.access_key}\n")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{s3.secret_key}\r\n")
    open_store(s3_location).probe()


def test_no_such_bucket(s3_location):
    error = reason_of(s3_location.model_copy(update={"uri": "s3://no-such-bucket/prefix"}))
    assert error.reason is FailureReason.STORAGE_NOT_FOUND
    assert "'no-such-bucket'" in error.message


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_keys(s3_location, monkeypatch, name):
    monkeypatch.setenv(name, "wrong-and-secret")
    error = reason_of(s3_location)
    assert error.reason is FailureReason.STORAGE_ACCESS_DENIED
    assert "Secret" in error.message
    assert "wrong-and-secret" not in error.message


def test_no_keys(s3_location, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    error = reason_of(s3_location)
    assert error.reason is FailureReason.STORAGE_ACCESS_DENIED
    assert "storage.credentialsSecret" in error.message


def test_half_of_the_keys(s3_location, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "\n")
    assert reason_of(s3_location).reason is FailureReason.STORAGE_ACCESS_DENIED


def test_nobody_listens(s3_location):
    (port,) = free_ports(1)
    error = reason_of(s3_location.model_copy(update={"endpoint": f"http://127.0.0.1:{port}"}))
    assert error.reason is FailureReason.STORAGE_UNAVAILABLE
    assert str(port) in error.message


def test_impossible_bucket_name(s3_location):
    assert reason_of(s3_location.model_copy(update={"uri": "s3://Not_A bucket"})).reason is FailureReason.INVALID_CONFIG


# SeaweedFS gives none of the following answers: a small server of our own gives them, and the real client reads them.


@contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def answering(status: int, code: str, tls: ssl.SSLContext | None = None) -> AbstractContextManager[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode() if code else b"<Result/>"
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer  # noqa: N815 - named by the base class

        def log_message(self, *_):
            pass

    return serving(Handler, tls)


@pytest.fixture
def some_keys(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")


def test_a_missing_bucket_is_no_missing_key(s3_location, tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    with answering(404, "NoSuchBucket") as endpoint:
        store = open_store(s3_location.model_copy(update={"endpoint": endpoint}))
        for use in (
            lambda: store.read("manifest.json"),
            lambda: list(store.list("")),
            lambda: store.upload(tmp_path / "file", "key"),
        ):
            with pytest.raises(StageError) as caught:
                use()
            assert caught.value.reason is FailureReason.STORAGE_NOT_FOUND


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (500, "InternalError", FailureReason.STORAGE_UNAVAILABLE),
        (503, "SlowDown", FailureReason.STORAGE_UNAVAILABLE),
        (429, "TooManyRequests", FailureReason.STORAGE_UNAVAILABLE),
        (507, "XMinioStorageFull", FailureReason.STORAGE_FULL),
        (403, "QuotaExceeded", FailureReason.STORAGE_FULL),
        (400, "XMinioAdminBucketQuotaExceeded", FailureReason.STORAGE_FULL),
        (507, "", FailureReason.STORAGE_FULL),
        (403, "AccessDenied", FailureReason.STORAGE_ACCESS_DENIED),
        (400, "ExpiredToken", FailureReason.STORAGE_ACCESS_DENIED),
        (501, "NotImplemented", FailureReason.STORAGE_UNSUPPORTED),
        (400, "XAmzContentSHA256Mismatch", FailureReason.STORAGE_UNSUPPORTED),
        (400, "IllegalLocationConstraintException", FailureReason.INVALID_CONFIG),
    ],
)
@pytest.mark.usefixtures("some_keys")
def test_answers_of_other_stores(status, code, reason):
    with answering(status, code) as endpoint:
        error = reason_of(StorageLocation(uri="s3://bucket/prefix", endpoint=endpoint))
    assert error.reason is reason
    assert code in error.message


@pytest.mark.usefixtures("some_keys")
def test_a_store_that_only_cannot_write_may_be_full():
    """SeaweedFS answers so above a bucket's quota."""
    with answering(500, "InternalError") as endpoint:
        store = open_store(StorageLocation(uri="s3://bucket/prefix", endpoint=endpoint))
        with pytest.raises(StageError, match="full disk or quota") as caught:
            store.write("key", b"")
        assert caught.value.reason is FailureReason.STORAGE_UNAVAILABLE
        with pytest.raises(StageError) as caught:
            store.read("key")
        assert "quota" not in caught.value.message


@pytest.mark.usefixtures("some_keys")
def test_a_store_that_ignores_if_none_match_is_refused():
    with answering(200, "") as endpoint:
        error = reason_of(StorageLocation(uri="s3://bucket/prefix", endpoint=endpoint))
    assert error.reason is FailureReason.STORAGE_UNSUPPORTED
    assert "If-None-Match" in error.message


@pytest.fixture
def own_ca(tmp_path) -> tuple[Path, ssl.SSLContext]:
    """A certificate that no machine trusts, and a server's side of it."""
    certificate, key = tmp_path / "ca.crt", tmp_path / "ca.key"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=osprey-test -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context


@pytest.mark.usefixtures("some_keys")
def test_certificate_of_an_own_ca(own_ca, monkeypatch):
    certificate, context = own_ca
    with answering(403, "AccessDenied", context) as endpoint:
        location = StorageLocation(uri="s3://bucket/prefix", endpoint=endpoint)
        error = reason_of(location)
        assert error.reason is FailureReason.INVALID_CONFIG
        assert "AWS_CA_BUNDLE" in error.message
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        assert reason_of(location).reason is FailureReason.STORAGE_ACCESS_DENIED  # the server's own answer
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate) + ".missing")
        error = reason_of(location)
        assert error.reason is FailureReason.INVALID_CONFIG
        assert "AWS_CA_BUNDLE" in error.message


@pytest.mark.usefixtures("some_keys")
def test_store_that_refuses_checksum_trailers(monkeypatch, tmp_path, own_ca):
    """As some versions of Ceph do with what newer clients send by default."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # whose clients are told to go on with the body

        def do_PUT(self):
            new = "x-amz-trailer" in self.headers
            self.connection.settimeout(0.5)
            with suppress(TimeoutError):
                while self.rfile.read1():
                    pass
            self.close_connection = True
            self.send_response(400 if new else 200)
            body = b"<Error><Code>XAmzContentSHA256Mismatch</Code></Error>" if new else b""
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    (tmp_path / "file").write_bytes(b"content")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(own_ca[0]))
    with serving(Handler, own_ca[1]) as endpoint:
        location = StorageLocation(uri="s3://bucket/prefix", endpoint=endpoint)
        open_store(location).upload(tmp_path / "file", "key")
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
        with pytest.raises(StageError) as caught:
            open_store(location).upload(tmp_path / "file", "key")
    assert caught.value.reason is FailureReason.STORAGE_UNSUPPORTED
    assert "AWS_REQUEST_CHECKSUM_CALCULATION" in caught.value.message


@pytest.mark.usefixtures("some_keys")
def test_a_part_goes_on_where_the_connection_broke():
    content = os.urandom(5_000_000)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            part = content[first : last + 1]
            self.send_response(206)
            self.send_header("Content-Length", str(len(part)))
            self.send_header("ETag", '"one"')
            self.end_headers()
            self.wfile.write(part[:2_000_000])  # and the connection ends

        def log_message(self, *_):
            pass

    with serving(Handler) as endpoint:
        store = open_store(StorageLocation(uri="s3://bucket/prefix", endpoint=endpoint))
        assert store.read_range("key", 100, 4_500_000) == content[100:4_500_100]


@pytest.mark.usefixtures("some_keys")
@pytest.mark.parametrize("replaced", [False, True])
def test_download_goes_on_where_the_connection_broke(tmp_path, replaced):
    content = os.urandom(5_000_000)
    asked: list[str | None] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            begin = int((self.headers.get("Range") or "bytes=0-")[6:-1])
            asked.append(self.headers.get("Range"))
            if replaced and len(asked) > 1:
                self.send_response(412 if self.headers["If-Match"] == '"one"' else 206)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            rest = content[begin:]
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(len(rest)))
            self.send_header("ETag", '"one"')
            self.end_headers()
            self.wfile.write(rest[:2_000_000])  # and the connection ends

        def log_message(self, *_):
            pass

    with serving(Handler) as endpoint:
        store = open_store(StorageLocation(uri="s3://bucket/prefix", endpoint=endpoint))
        if replaced:
            with pytest.raises(StageError, match="has another") as caught:
                store.download("key", tmp_path / "file")
            assert caught.value.reason is FailureReason.STORAGE_UNAVAILABLE
            return
        store.download("key", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == content
    assert asked[0] is None
    assert len(asked) >= 3
