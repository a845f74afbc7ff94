import pytest

from osprey_operator.settings import Ports, SettingsError, from_environment, ports
from osprey_operator.state import Settings


def test_an_empty_environment_gives_the_defaults():
    assert from_environment({}) == Settings()
    assert from_environment({"OSPREY_WORKERS": " ", "OSPREY_STORAGE": ""}) == Settings()
    assert ports({}) == Ports()


def test_all_of_it():
    settings = from_environment(
        {
            "OSPREY_NAMESPACES": "b, a,",
            "OSPREY_TRAINER_IMAGE": "t",
            "OSPREY_SERVING_IMAGE": "s",
            "OSPREY_SGLANG_IMAGE": "g",
            "OSPREY_SGLANG_VERSION": "1",
            "OSPREY_IMAGE_PULL_POLICY": "Always",
            "OSPREY_POD_TEMPLATE": '{"spec": {"nodeSelector": {"a": "b"}}}',
            "OSPREY_STORAGE": '{"uri": "s3://bucket/x", "credentialsSecret": "s3"}',
            "OSPREY_WORKERS": "3",
            "OSPREY_POLL_SECONDS": "0.5",
        }
    )
    assert settings.namespaces == ("a", "b")
    assert settings.pod_template == {"spec": {"nodeSelector": {"a": "b"}}}
    assert settings.storage is not None
    assert settings.storage.credentials_secret == "s3"
    assert (settings.workers, settings.poll_seconds, settings.image_pull_policy) == (3, 0.5, "Always")
    assert ports({"OSPREY_METRICS_PORT": "1", "OSPREY_HEALTH_PORT": "2"}) == Ports(1, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OSPREY_WORKERS", "0"),
        ("OSPREY_WORKERS", "many"),
        ("OSPREY_POLL_SECONDS", "nan"),
        ("OSPREY_POLL_SECONDS", "-1"),
        ("OSPREY_POD_TEMPLATE", "[]"),
        ("OSPREY_POD_TEMPLATE", "{"),
        ("OSPREY_STORAGE", '{"uri": "http://x"}'),
        ("OSPREY_STORAGE", '{"uri": "s3://bucket", "secret": "x"}'),
    ],
)
def test_what_cannot_be_used_is_named(name, value):
    with pytest.raises(SettingsError, match=name):
        from_environment({name: value})


def test_a_port_is_a_port():
    with pytest.raises(SettingsError, match="OSPREY_HEALTH_PORT"):
        ports({"OSPREY_HEALTH_PORT": "70000"})
