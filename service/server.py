"""Composes the gateway and runs it: pool, slots, servicers, health, reflection, signals.

Knows the order of starting and stopping; knows nothing of what calls do.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
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
from pagecast.worker.v1 import worker_pb2
from service.config import ServeSettings
from service.drain import DrainInterceptor, draining
from service.errors import StartError
from service.generation import GenerationServicer
from service.health import HealthServicer
from service.interceptors import ErrorInterceptor
from service.models import ModelServicer
from service.pool import Pool
from service.pool.link import WorkerLink
from service.pool.local import LocalPool
from service.pool.slot import Slot, start_all
from service.pool.static import StaticPool
from service.pool.steps import worker_lost
from service.reflection import add_reflection
from service.replays import Replays
from service.router import Router
from service.sessions import SessionServicer
from service.turns import Turns

# After the turns have ended: for their last messages, and for calls that are no turns.
CALL_GRACE_S = 1.0
# Where it can't wait: for calls that have just been told how they end to say so.
LAST_WORDS_S = 0.2
WORKER_GRACE_S = 5.0
FILES = (session_pb2.DESCRIPTOR, generation_pb2.DESCRIPTOR, model_pb2.DESCRIPTOR)
SERVICES = tuple(service.full_name for file in FILES for service in file.services_by_name.values())
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


class _SupervisorGone(Exception):
    """The process that runs the workers ended, and they with it."""


def serve(settings: ServeSettings) -> int:
    """Run the gateway until it is told to stop.

    Returns:
        The process's exit code: 0 after SIGTERM or SIGINT; 1 if it could not start, or lost the supervisor
        of its workers (one log line says why), so that whatever keeps the service running starts it anew.
    """
    with process_log(settings.log_level) as log:
        # Until `_run` takes the signals over, one ends the start as Ctrl-C does: nothing is served yet.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            pool = _open_pool(settings, log)
            try:
                asyncio.run(_run(settings, pool, log))
            finally:
                pool.stop(0.0)
        except StartError as error:
            log.error("gateway_failed", error=str(error))
            return 1
        except _SupervisorGone:
            log.error("gateway_failed", error="the supervisor of the workers is gone")
            return 1
        except Exception as error:  # a bug
            log.error("gateway_failed", error=f"{type(error).__name__}: {error}", exc_info=error)
            return 1
        except KeyboardInterrupt:
            pass
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

    def urge(self) -> None:
        """Stop at once: there is nothing left to end in order."""
        self.requested.set()
        self.urged.set()

    def _on_signal(self) -> None:
        (self.urged if self.requested.is_set() else self.requested).set()


def _open_pool(settings: ServeSettings, log: FilteringBoundLogger) -> Pool:
    if settings.worker_addresses:
        return StaticPool(settings.worker_addresses)
    return LocalPool.start(settings, log)


async def _run(settings: ServeSettings, pool: Pool, log: FilteringBoundLogger) -> None:
    """Serve from the pool's workers until a signal, then end turns, links and workers in that order."""
    stop = _Stop()
    drain = DrainInterceptor()
    server = grpc.aio.server(interceptors=[ErrorInterceptor(log), drain], options=SERVER_OPTIONS)
    listen = _bind(server, settings.listen)
    log.info("gateway_starting", workers=pool.size)
    watching = asyncio.create_task(pool.watch())
    slots = [Slot(index, pool, settings, log) for index in range(pool.size)]
    starting = asyncio.create_task(start_all(slots))
    try:
        await _first(starting, watching, event=stop.requested)
        if starting.done():
            router = Router(await starting)
            services = await add_services(server, router, log)
            async with _kept(slots, router, services.health) as keeping:
                await server.start()
                log.info("gateway_ready", listen=listen, models=[model.name for model in router.models()])
                await _serve(
                    server, services, [watching, keeping], stop, drain, settings.drain_timeout_s, log
                )
        elif watching.done():
            raise _SupervisorGone
    finally:
        starting.cancel()
        await asyncio.wait([starting])
        await asyncio.gather(*(slot.close() for slot in slots))
        watching.cancel()
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


@dataclass(frozen=True, slots=True)
class Services:
    """What of the services the server itself has to do with."""

    health: HealthServicer
    turns: Turns


async def add_services(
    server: grpc.aio.Server, router: Router[WorkerLink], log: FilteringBoundLogger
) -> Services:
    """Put every service on a server that has not started; health tells what the router has now."""
    turns, replays, health = Turns(), Replays(), HealthServicer(SERVICES)
    session_pb2_grpc.add_SessionServiceServicer_to_server(SessionServicer(router, turns, replays), server)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(
        GenerationServicer(router, turns, replays, log), server
    )
    model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(router), server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    add_reflection(server, (*FILES, health_pb2.DESCRIPTOR))
    await health.tell(is_serving=bool(router.models()))
    return Services(health, turns)


@contextlib.asynccontextmanager
async def _kept(
    slots: Sequence[Slot], router: Router[WorkerLink], health: HealthServicer
) -> "AsyncIterator[asyncio.Task[Any]]":
    """Keep the slots connected while the block runs, and router and health by them.

    Yields what does so; it ends by itself only with the exception that is a bug there.
    """
    has_changed = asyncio.Event()

    def on_change(lost: WorkerLink, now: WorkerLink | None) -> None:
        if now is not None:
            if now.instance_id == lost.instance_id:
                _close_left(router.held_by(lost), now)
            router.add(now)
        has_changed.set()

    async def tell_health() -> None:
        while True:
            await has_changed.wait()
            has_changed.clear()
            await health.tell(is_serving=bool(router.models()))

    async def keep() -> None:
        await asyncio.gather(*(slot.keep(on_change) for slot in slots), tell_health())

    keeping = asyncio.create_task(keep())
    try:
        yield keeping
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


def _close_left(session_ids: Sequence[str], link: WorkerLink) -> None:
    """Close sessions in a worker that was out of reach: they have been told to have failed."""
    for session_id in session_ids:
        request = worker_pb2.CloseSessionRequest(session_id=session_id)
        link.spawn(link.attempt(partial(link.call, link.stub.CloseSession, request)))


async def _serve(
    server: grpc.aio.Server,
    services: Services,
    supports: "Sequence[asyncio.Task[Any]]",
    stop: _Stop,
    drain: DrainInterceptor,
    drain_timeout_s: float,
    log: FilteringBoundLogger,
) -> None:
    """Serve until a signal, then drain. Raises _SupervisorGone, or what else ended one of `supports`."""
    last_words = draining()
    try:
        await _first(*supports, event=stop.requested)
        await _check(supports, stop)
        log.info("gateway_stopping", num_turns=services.turns.num_running)
        drain.begin()
        await services.health.end()
        idle = asyncio.create_task(services.turns.wait_idle())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_timeout_s):
                await _first(idle, *supports, event=stop.urged)
        idle.cancel()
        await _check(supports, stop)
    except _SupervisorGone:
        last_words = worker_lost()
        raise
    finally:
        services.turns.fail_all(last_words)
        await _stop_server(server, stop)


async def _check(supports: "Sequence[asyncio.Task[Any]]", stop: _Stop) -> None:
    """Raise _SupervisorGone, or what else ended one of `supports`, where one has ended: a stop at once."""
    for ended in filter(asyncio.Task.done, supports):
        stop.urge()
        await ended
        raise _SupervisorGone


async def _stop_server(server: grpc.aio.Server, stop: _Stop) -> None:
    """Refuse new calls and let running ones end for `CALL_GRACE_S`, or `LAST_WORDS_S` once urged."""
    ending = asyncio.create_task(server.stop(CALL_GRACE_S))
    await _first(ending, event=stop.urged)
    if not ending.done():
        await server.stop(LAST_WORDS_S)
    await ending


async def _stop_pool(pool: Pool, stop: _Stop) -> None:
    ending = asyncio.create_task(asyncio.to_thread(pool.stop, WORKER_GRACE_S))
    await _first(ending, event=stop.urged)
    if not ending.done():
        await asyncio.to_thread(pool.stop, 0.0)
    await ending


async def _first(*tasks: "asyncio.Task[Any]", event: asyncio.Event) -> None:
    """Wait for whichever comes first; leaves the tasks as they are, also when cancelled."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({*tasks, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
