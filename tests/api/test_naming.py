"""Names must be labels, stay apart, and leave room for what Kubernetes adds to them."""

import re

import pytest

from osprey_api.naming import JOB_NAME_LIMIT, shortened, stage_job_name

LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
FINGERPRINT = "0123456789abcdef" * 4


@pytest.mark.parametrize("length", [1, 30, 50, 63, 200, 253])
@pytest.mark.parametrize("stage", ["prune", "regenerate"])
def test_job_names_are_labels_with_room_for_the_index(length, stage):
    name = stage_job_name("a" * length, stage, FINGERPRINT)
    assert LABEL.match(name)
    assert len(name) <= JOB_NAME_LIMIT
    assert name.endswith(f"-{stage}-01234567")


def test_short_names_stay_readable():
    assert stage_job_name("qwen3", "distil", FINGERPRINT) == "qwen3-distil-01234567"


def test_two_long_names_with_one_beginning_stay_apart():
    first, second = ("x" * 60 + end for end in ("one", "two"))
    assert shortened(first, 30) != shortened(second, 30)


def test_a_dot_and_a_hyphen_stay_apart():
    assert shortened("a.b", 30) != shortened("a-b", 30)
    assert LABEL.match(shortened("a.b", 30))


def test_no_cut_leaves_a_hyphen_at_the_end():
    assert LABEL.match(shortened("a" * 20 + "-" + "b" * 40, 30))
