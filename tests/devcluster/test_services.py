import json
import urllib.parse
import urllib.request
from dataclasses import replace

import pytest
from botocore.exceptions import ClientError

from dev import processes
from dev.services import Prometheus, S3Server


def test_s3_keeps_what_was_put(s3, bucket):
    s3.client().put_object(Bucket=bucket, Key="k", Body=b"v")

    assert s3.client().get_object(Bucket=bucket, Key="k")["Body"].read() == b"v"


def test_s3_writes_only_once_when_asked_to(s3, bucket):
    s3.client().put_object(Bucket=bucket, Key="k", Body=b"first", IfNoneMatch="*")

    with pytest.raises(ClientError, match="PreconditionFailed"):
        s3.client().put_object(Bucket=bucket, Key="k", Body=b"second", IfNoneMatch="*")


def test_s3_refuses_a_wrong_secret(s3, bucket):
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        replace(s3, secret_key="wrong").client().list_objects_v2(Bucket=bucket)


def test_s3_that_fails_to_start_leaves_nothing(tmp_path):
    (tmp_path / "data").touch()  # a file where its folder should be

    with pytest.raises(FileExistsError), S3Server(tmp_path):
        pass
    assert processes.running(str(tmp_path)) == {}


def test_prometheus_answers_for_what_it_scrapes(tmp_path):
    with Prometheus(tmp_path / "other", []) as other:
        job = {"job_name": "other", "static_configs": [{"targets": [f"127.0.0.1:{other.port}"]}]}
        with Prometheus(tmp_path / "one", [job], scrape_interval_s=1) as one:
            query = urllib.parse.urlencode({"query": 'up{job="other"} == 1'})

            def scraped():
                with urllib.request.urlopen(f"{one.url}/api/v1/query?{query}") as answer:  # noqa: S310
                    return bool(json.load(answer)["data"]["result"])

            processes.wait("a scrape", scraped, 20, tmp_path / "one" / "prometheus.log")
    assert processes.running(str(tmp_path / "one")) == {}


def test_prometheus_tells_what_is_wrong_with_a_scrape_config(tmp_path):
    with (
        pytest.raises(processes.NotReadyError, match="field job_nme not found"),
        Prometheus(tmp_path, [{"job_nme": "x"}]),
    ):
        pass
