"""Sources of models and data."""

import pytest

from osprey_api.sources import ClaimSource, HubSource, S3Source, parse


def test_the_three_kinds():
    assert parse("hf://openai/gsm8k?name=main&split=train") == HubSource(
        "openai/gsm8k", {"name": "main", "split": "train"}
    )
    assert parse("s3://drafters/a/b.jsonl") == S3Source("drafters", "a/b.jsonl")
    assert parse("pvc://models/qwen/8b") == ClaimSource("models", "qwen/8b")
    assert parse("pvc://models/qwen/8b").mounted_path == "/osprey/claims/models/qwen/8b"
    assert parse("pvc://models").mounted_path == "/osprey/claims/models"


@pytest.mark.parametrize(
    "uri", ["", "Qwen/Qwen3-8B", "http://x/y", "hf://only", "s3://UPPER/x", "s3://x", "pvc://", "pvc:///x"]
)
def test_what_is_no_source_is_refused_with_what_to_write(uri):
    with pytest.raises(ValueError, match="write hf://OWNER/NAME"):
        parse(uri)


def test_a_path_does_not_leave_its_claim():
    with pytest.raises(ValueError, match=r"without '\.\.'"):
        parse("pvc://models/../../etc")
