"""What is not written any more once the API server has refused something."""

import asyncio

import pytest

from osprey_api.stages import StageName
from osprey_operator.api import ApiError
from osprey_operator.cache import Cache
from osprey_operator.execute import Executor
from osprey_operator.manifests.server import admin_secret_name
from osprey_operator.state import Plan
from tests.operator.manifests.builders import objects, owner, task


class Refusing:
    """Stands for the API server: it takes everything but the Service, or the Secret, that it is told to refuse."""

    def __init__(self, name, status):
        self.name = name
        self.status = status
        self.made = []

    async def create(self, wanted):
        if wanted["metadata"]["name"] == self.name and wanted["kind"] != "Job":
            raise ApiError(self.status, "no")
        self.made.append(wanted["metadata"]["name"])
        return {**wanted, "metadata": {**wanted["metadata"], "uid": wanted["metadata"]["name"]}}

    async def get(self, kind, namespace, name):
        return {"kind": kind, "metadata": {"namespace": namespace, "name": name, "uid": "somebody's"}}


@pytest.mark.parametrize(("status", "reason"), [(403, "PodRefused"), (409, "NameTaken")])
def test_a_job_is_not_made_without_its_service(status, reason):
    distil = objects(task=task(StageName.DISTIL, nodes=2))
    other = objects(StageName.BASELINE)
    service = distil[0]["metadata"]["name"]
    api = Refusing(service, status)
    done = asyncio.run(Executor(api, Cache()).act(Plan(create=(*distil, *other)), owner(), ()))
    assert api.made == [other[-1]["metadata"]["name"]]
    assert [(refused.child, refused.reason) for refused in done.refused] == [(f"Service {service}", reason)]


def test_the_secret_that_is_there_is_ours_and_is_not_read():
    api = Refusing(admin_secret_name(owner()), 409)
    api.get = None
    done = asyncio.run(Executor(api, Cache()).act(Plan(admin_secret=api.name), owner(), ()))
    assert done.refused == ()
