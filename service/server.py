"""Composes the gateway and runs it: pool, links, servicers, health, reflection, signals.

Knows the order of starting and stopping; knows nothing of what calls do.
"""

import asyncio
import signal
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from structlog.typing import FilteringBoundLogger

from pagecast._process_log import process_log
from pagecast.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from service.config import ServeSettings
from service.errors import NoWorkerLeft, StartError
from service.generation import GenerationServicer
from service.interceptors import ErrorInterceptor
from service.models import ModelServicer
from service.pool import Pool
from service.pool.link import WorkerLink
from service.pool.local import LocalPool
from service.pool.static import StaticPool
from service.router import Router
from service.sessions import SessionServicer

STREAM_GRACE_S = 5.0
WORKER_GRACE_S = 5.0
SERVICES = (
    session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name,
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
)
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    # Two servers that share a port without a word would each see half of the calls.
    ("grpc.so_reuseport", 0),
    # Pings that clients may send; `pagecast.client` stays above.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # Finds clients that vanished without closing, so that their turns are cancelled.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


def serve(settings: ServeSettings) -> int:
    """Run the gateway until it is told to stop.

    Returns:
        The process's exit code: 0 after SIGTERM or SIGINT; 1 if it could not start or every worker is
        lost (one log line says why), so that whatever keeps the service running starts it anew.
    """
    with process_log(settings.log_level) as log:
        try:
            pool = _open_pool(settings)
            try:
                asyncio.run(_run(settings, pool, log))
            finally:
                pool.stop(0.0)
        except StartError as error:
            log.error("gateway_failed", error=str(error))
            return 1
        except NoWorkerLeft:
            log.error("gateway_failed", error="every worker is lost")
            return 1
        except Exception as error:  # a bug
            log.error("gateway_failed", error=f"{type(error).__name__}: {error}", exc_info=error)
            return 1
        except KeyboardInterrupt:
            pass  # before `_run` took the signals over: nothing was served that has to end in order
        log.info("gateway_stopped")
        return 0


class _Stop:
    """What the signals SIGTERM and SIGINT said: once to stop in order, twice to stop at once."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.urged = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.urged if self.requested.is_set() else self.requested).set()


def _open_pool(settings: ServeSettings) -> Pool:
    if settings.worker_addresses:
        return StaticPool(settings.worker_addresses)
    return LocalPool.spawn(settings)


async def _run(settings: ServeSettings, pool: Pool, log: FilteringBoundLogger) -> None:
    """Serve from the pool's workers until a signal, then end streams, links and workers in that order."""
    stop = _Stop()
    server = grpc.aio.server(interceptors=[ErrorInterceptor(log)], options=SERVER_OPTIONS)
    listen = _bind(server, settings.listen)
    log.info("gateway_starting", workers=len(pool.addresses))
    starting = asyncio.create_task(_connect(settings, pool, log))
    if await _before(starting, stop.requested):
        links = await starting
        try:
            await _serve(server, links, listen, stop, log)
        finally:
            await asyncio.gather(*(link.close() for link in links))
    else:
        starting.cancel()
        await asyncio.wait([starting])
    await _stop_pool(pool, stop)


def _bind(server: grpc.aio.Server, listen: str) -> str:
    """Take the port, before workers load for nothing. Returns the address with the port that it got."""
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise StartError(
            f"cannot listen on {listen}: the address is in use or not of this machine"
        ) from error
    return f"{listen.rpartition(':')[0]}:{port}"


async def _connect(settings: ServeSettings, pool: Pool, log: FilteringBoundLogger) -> list[WorkerLink]:
    """Wait until every worker serves; the first that cannot ends the wait. Raises StartError."""
    tasks = [
        asyncio.create_task(
            WorkerLink.connect(
                address,
                version=version("pagecast"),
                exit_code=partial(pool.exit_code, address),
                timeout_s=settings.start_timeout_s,
                log=log,
            )
        )
        for address in pool.addresses
    ]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, WorkerLink):
                await result.close()
        raise


async def _serve(
    server: grpc.aio.Server, links: Sequence[WorkerLink], listen: str, stop: _Stop, log: FilteringBoundLogger
) -> None:
    router = Router(links)
    health_servicer = await add_services(server, router, log)
    await server.start()
    log.info("gateway_ready", listen=listen, models=[model.name for model in router.models()])
    try:
        all_lost = asyncio.create_task(_wait_all_lost(links))
        are_lost = await _before(all_lost, stop.requested)
        all_lost.cancel()
        log.info("gateway_stopping")
        await health_servicer.enter_graceful_shutdown()
    finally:
        await _stop_server(server, stop)
    if are_lost:
        raise NoWorkerLeft


async def add_services(
    server: grpc.aio.Server, router: Router[WorkerLink], log: FilteringBoundLogger
) -> health.aio.HealthServicer:
    """Put every service on a server that has not started. Returns the health servicer, SERVING."""
    session_pb2_grpc.add_SessionServiceServicer_to_server(SessionServicer(router), server)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(router, log), server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(router), server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    await _set_health(health_servicer, health_pb2.HealthCheckResponse.SERVING)
    return health_servicer


async def _set_health(
    servicer: health.aio.HealthServicer, status: health_pb2.HealthCheckResponse.ServingStatus
) -> None:
    for name in ("", *SERVICES):
        await servicer.set(name, status)


async def _wait_all_lost(links: Sequence[WorkerLink]) -> None:
    for link in links:
        await link.lost.wait()


async def _stop_server(server: grpc.aio.Server, stop: _Stop) -> None:
    """Refuse new calls and let running ones end for `STREAM_GRACE_S`, or not at all once urged."""
    ending = asyncio.create_task(server.stop(STREAM_GRACE_S))
    if not await _before(ending, stop.urged):
        await server.stop(0.0)
    await ending


async def _stop_pool(pool: Pool, stop: _Stop) -> None:
    ending = asyncio.create_task(asyncio.to_thread(pool.stop, WORKER_GRACE_S))
    if not await _before(ending, stop.urged):
        await asyncio.to_thread(pool.stop, 0.0)
    await ending


async def _before(task: asyncio.Task[Any], event: asyncio.Event) -> bool:
    """Wait for whichever comes first; True if it is the task. Leaves the task as it is."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return task.done()
