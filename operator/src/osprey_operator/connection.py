"""How the API server is reached, for the client that writes and for Kopf, which watches: one set of credentials."""

from typing import Any

import kopf
from kubernetes.aio import config
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException


async def load_configuration() -> Any:
    """Return the client configuration of the pod's service account or, outside a cluster, of KUBECONFIG.

    Raises:
        kubernetes.aio.config.ConfigException: there is neither.
    """
    configuration = Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except ConfigException:
        await config.load_kube_config(client_configuration=configuration)
    return configuration


def register_login(registry: kopf.OperatorRegistry) -> None:
    """Give Kopf the same credentials. It asks again whenever the API server does not take them any more."""

    async def login(settings: kopf.OperatorSettings, **_: Any) -> kopf.ConnectionInfo:
        configuration = await load_configuration()
        header = await configuration.get_api_key_with_prefix("BearerToken") or ""
        return kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
            token=header.rpartition(" ")[2].strip() or None,
            trust_env=settings.networking.trust_env,
        )

    kopf.on.login(id="login", registry=registry)(login)
