"""Which programs the commands of a demonstration are."""

from dev.kubectl import Kubectl


def test_a_machine_without_kubectl_and_helm_has_those_that_were_built(tmp_path):
    bare = Kubectl({"PATH": str(tmp_path)})
    assert bare.run("helm", "version", "--short").startswith("v")
    assert "Client Version" in bare.run("kubectl", "version", "--client")


def test_a_users_own_programs_come_first(tmp_path):
    own = tmp_path / "helm"
    own.write_text("#!/bin/sh\necho mine\n")
    own.chmod(0o755)
    assert Kubectl({"PATH": str(tmp_path)}).run("helm") == "mine\n"
