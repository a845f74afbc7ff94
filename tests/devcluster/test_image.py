import io
import json
import tarfile

import pytest

from dev.cluster import image


def opened(archive):
    return tarfile.open(fileobj=io.BytesIO(archive))


def blob(archive, descriptor):
    with opened(archive) as tar:
        return tar.extractfile(f"blobs/sha256/{descriptor['digest'].removeprefix('sha256:')}").read()


@pytest.fixture
def manifest():
    with opened(image.dev_image()) as tar:
        (entry,) = json.load(tar.extractfile("index.json"))["manifests"]
    return json.loads(blob(image.dev_image(), entry))


def test_the_development_image_is_a_few_kilobytes():
    assert len(image.dev_image()) < 40_000


def test_it_is_the_same_every_time():
    assert image.dev_image() == image.dev_image()


def test_its_programs_are_links_into_usr(manifest):
    with opened(blob(image.dev_image(), manifest["layers"][0])) as root:
        links = {entry.name: entry.linkname for entry in root if entry.issym()}
        folders = {entry.name for entry in root if entry.isdir()}

    assert links == {name: f"usr/{name}" for name in ("bin", "sbin", "lib", "lib64")}
    assert {"usr", "tmp", "proc", "sys", "dev", "etc", "run", "var"} <= folders


def test_it_runs_as_a_user_that_has_a_name(manifest):
    config = json.loads(blob(image.dev_image(), manifest["config"]))

    assert config["config"]["User"] == "1000:1000"
    with opened(blob(image.dev_image(), manifest["layers"][0])) as root:
        assert b":1000:1000:" in root.extractfile("etc/passwd").read()
