import pytest

from dev.cluster.api import ApiError


def test_s3_is_real(s3, bucket):
    s3.client().put_object(Bucket=bucket, Key="k", Body=b"v")

    assert s3.client().get_object(Bucket=bucket, Key="k")["Body"].read() == b"v"


def test_namespaces_enforce_the_restricted_standard(api_cluster, namespace):
    name = namespace(api_cluster)
    root = {"name": "c", "image": "i", "securityContext": {"runAsUser": 0}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [root]}}

    with pytest.raises(ApiError, match="violates PodSecurity"):
        api_cluster.api().apply(f"/api/v1/namespaces/{name}/pods/p", pod)
