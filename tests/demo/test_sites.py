"""Where the demonstration runs."""

import pytest

from dev.demo.sites import VALUES_VARIABLE, Existing, Local, SiteError, choose


def test_on_this_machine_unless_another_cluster_is_named():
    assert isinstance(choose({}), Local)
    with pytest.raises(SiteError, match=f"set {VALUES_VARIABLE}, AWS_ACCESS_KEY_ID"):
        choose({"KUBECONFIG": "other"})
    told = {"KUBECONFIG": "other", VALUES_VARIABLE: "v", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    assert isinstance(choose(told), Existing)


def test_its_own_cluster_is_no_other_one():
    """In a shell in which somebody looked around."""
    assert isinstance(choose(Local().cluster.environment()), Local)
