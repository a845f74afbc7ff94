"""A certificate authority for one cluster, by the openssl command."""

import base64
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

DAYS = "365"


@dataclass(frozen=True)
class Authority:
    """A folder of keys and certificates: ``ca.crt`` and one pair for each name."""

    folder: Path

    @property
    def certificate(self) -> Path:
        """The authority's own certificate."""
        return self.folder / "ca.crt"

    def create(self) -> None:
        """Make the authority and the key that signs service accounts' tokens, ``sa.key``."""
        self.folder.mkdir(mode=0o700)
        files: list[str | Path] = ["-keyout", self.folder / "ca.key", "-out", self.certificate]
        _openssl("req", "-x509", *_NEW_KEY, "-nodes", *files, "-days", DAYS, "-subj", "/CN=osprey-dev")
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", self.folder / "sa.key")

    def issue(self, name: str, subject: str, hosts: tuple[str, ...] = ()) -> None:
        """Make the pair ``name.key``, ``name.crt``.

        Args:
            name: of the files.
            subject: as openssl writes it; CN is the user, O the groups.
            hosts: ``IP:...`` and ``DNS:...`` that a server answers for.
        """
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        key, certificate = self.key(name), self.cert(name)
        _openssl("req", *_NEW_KEY, "-nodes", "-keyout", key, "-out", request, "-subj", subject)
        names = f"subjectAltName={','.join(hosts)}\n" if hosts else ""
        extensions.write_text(f"{names}extendedKeyUsage=serverAuth,clientAuth\n")
        by: list[str | Path] = ["-CA", self.certificate, "-CAkey", self.folder / "ca.key", "-CAcreateserial"]
        _openssl("x509", "-req", "-in", request, *by, "-out", certificate, "-days", DAYS, "-extfile", extensions)

    def key(self, name: str) -> Path:
        """The private key of a pair."""
        return self.folder / f"{name}.key"

    def cert(self, name: str) -> Path:
        """The certificate of a pair."""
        return self.folder / f"{name}.crt"

    def kubeconfig(self, name: str, server: str) -> str:
        """A kubeconfig for the user of one pair; it holds the pair, so the file can be moved."""
        cluster = {"server": server, "certificate-authority-data": _encoded(self.certificate)}
        pair = {
            "client-certificate-data": _encoded(self.cert(name)),
            "client-key-data": _encoded(self.key(name)),
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": CONTEXT,
            "clusters": [{"name": CONTEXT, "cluster": cluster}],
            "users": [{"name": CONTEXT, "user": pair}],
            "contexts": [{"name": CONTEXT, "context": {"cluster": CONTEXT, "user": CONTEXT}}],
        }
        return json.dumps(config, indent=1)


CONTEXT = "osprey-dev"
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def _encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()
