"""The operator's process: `python -m osprey_operator`, configured by variables (see `settings`)."""

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import kopf
from aiohttp import ClientError, web
from kubernetes.aio.client import ApiClient
from kubernetes.aio.config import ConfigException

from osprey_operator import handlers
from osprey_operator.api import Api, ApiError
from osprey_operator.cache import Cache
from osprey_operator.connection import load_configuration, register_login
from osprey_operator.execute import Executor
from osprey_operator.live import LiveMonitor
from osprey_operator.metrics import Metrics
from osprey_operator.observe import Observer
from osprey_operator.queue import WorkQueue
from osprey_operator.reconcile import Reconciler
from osprey_operator.settings import Ports, SettingsError, from_environment, ports
from osprey_operator.state import KubernetesObject, Settings

logger = logging.getLogger("osprey_operator")

HUNG_SECONDS = 600
"""A pass takes seconds. After so long a one the process says that it is not alive, and is restarted."""


async def operate(settings: Settings, own: Ports) -> None:
    """Watch, work and answer until stopped by SIGTERM or SIGINT, at which Kopf ends the watches.

    Raises:
        SystemExit: the CRDs are not installed, or a part ended that should not.
    """
    async with ApiClient(await load_configuration()) as client:
        api = Api(client)
        if not await api.has_kinds():
            raise SystemExit("the CRDs of osprey.dev are not installed: kubectl apply -f crds/")
        cache = Cache()
        live = LiveMonitor(interval_seconds=settings.poll_seconds)
        observer = Observer(api, cache, live, resync_seconds=settings.resync_seconds)
        reconciler = Reconciler(
            cache=cache,
            observer=observer,
            executor=Executor(api, cache),
            settings=settings,
            clock=lambda: datetime.now(UTC),  # noqa: TID251 - the one clock of the process
        )
        metrics = Metrics(resources=cache.everywhere, live=live)
        queue = WorkQueue(
            metrics.counted(reconciler.reconcile),
            workers=settings.workers,
            expected=(ApiError, ClientError, TimeoutError),
        )
        metrics.watch_queue(depth=queue.depth, last_pass_age=queue.last_pass_age)

        def pods() -> Iterator[KubernetesObject]:
            return cache.everywhere("Pod")

        servers = (await _serve_health(queue, own.health), await metrics.serve(own.metrics))
        parts = {
            asyncio.create_task(queue.run(), name="queue"),
            asyncio.create_task(live.run(pods), name="live monitor"),
        }
        await asyncio.sleep(0)  # Kopf cancels, in the end, the tasks that began after it
        watches = asyncio.create_task(_watch(settings, cache, queue), name="watches")
        parts.add(watches)
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            for server in servers:
                await server.cleanup()
        for ended in done:
            if ended is not watches or ended.exception() is not None:
                logger.error("%s ended", ended.get_name(), exc_info=ended.exception())
                raise SystemExit(1)


async def _watch(settings: Settings, cache: Cache, queue: WorkQueue) -> None:
    registry = kopf.OperatorRegistry()
    register_login(registry)
    handlers.register(registry, cache, queue)
    configuration = kopf.OperatorSettings()
    handlers.configure(configuration)
    await kopf.operator(
        registry=registry,
        settings=configuration,
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
    )


async def _serve_health(queue: WorkQueue, port: int) -> web.AppRunner:
    """Answer liveness probes: the process is alive while no pass hangs."""

    async def answer(_: web.Request) -> web.Response:
        seconds = queue.longest_pass()
        report = {"longest_pass_seconds": round(seconds, 1), "last_pass_age_seconds": queue.last_pass_age()}
        return web.json_response(report, status=503 if seconds > HUNG_SECONDS else 200)

    application = web.Application()
    application.router.add_get("/healthz", answer)
    runner = web.AppRunner(application, access_log=None, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner


def main() -> int:
    """Run the operator; return the exit code."""
    logging.basicConfig(
        level=os.environ.get("OSPREY_LOG_LEVEL", "INFO").upper(),  # noqa: TID251 - read here, passed on
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # it tells of every event that was listened to
    try:
        settings, own = from_environment(os.environ), ports(os.environ)  # noqa: TID251 - read here, passed on
        asyncio.run(operate(settings, own))
    except (SettingsError, ConfigException) as error:
        logger.error("%s", error)  # noqa: TRY400 - the sentence says it all
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
