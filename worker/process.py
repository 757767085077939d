"""Composes a worker and runs it: model, pool, warm plans, then serve. Knows no call and no step."""

import asyncio
import contextlib
import gc
import importlib.metadata
import logging
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import torch

from pagecast._log import Log
from pagecast.v1 import model_pb2
from pagecast.worker.v1 import worker_pb2_grpc
from worker.access import TokenInterceptor
from worker.batch import StepReport, TokenDrawn
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.intake import Intake
from worker.kernel_choice import KernelsMissing, SettingRefused
from worker.kv.block_pool import BlockPool
from worker.loading import Loaded, load
from worker.memory import PoolTooLarge, give_back, out_of_memory
from worker.model.chat import ChatTemplate
from worker.model.config import ModelFileError
from worker.plan.executor import KernelsUnsuitable
from worker.runner import RowsNotInvariant
from worker.scheduler import PagedSessionScheduler
from worker.server import WorkerService

EXIT_OTHER = 1
EXIT_FLAGS = 2
EXIT_MODEL_FILE = 3
EXIT_LISTEN = 4
EXIT_KERNELS = 5
EXIT_NOT_INSTALLED = 6
EXIT_MEMORY = 7
_STOP_GRACE_S = 1.0
_ORPHAN_GRACE_S = 0.5
# The gateway pings every 20 s; a stricter minimum here would end its streams with GOAWAY.
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
)


def run(config: WorkerConfig, log: Log) -> int:
    """Run a worker until SIGTERM, SIGINT or the end of its parent.

    Returns:
        The exit status; where it is not 0, one `worker_failed` event says why.
    """
    try:
        return asyncio.run(_serve(config, log))
    except SettingRefused as error:
        log.error("worker_failed", error=str(error))
        return EXIT_FLAGS
    except ModelFileError as error:
        log.error("worker_failed", error=str(error), model=config.model)
        return EXIT_MODEL_FILE
    except (RowsNotInvariant, KernelsUnsuitable) as error:
        log.error("worker_failed", error=str(error))
        return EXIT_KERNELS
    except KernelsMissing as error:
        log.error("worker_failed", error=str(error))
        return EXIT_NOT_INSTALLED
    except PoolTooLarge as error:
        log.error("worker_failed", error=str(error))
        return EXIT_MEMORY
    except Exception as error:
        if told := out_of_memory(error):
            log.error("worker_failed", error=told)
            return EXIT_MEMORY
        log.error("worker_failed", error=f"{type(error).__name__}: {error}", exc_info=error)
        return EXIT_OTHER


async def _serve(config: WorkerConfig, log: Log) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    token = ""
    if config.parent_fd >= 0:
        token = _read_token(config.parent_fd)
        # A Ctrl-C on the parent's terminal reaches the whole group; the parent decides what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_watch_parent, args=(config.parent_fd, loop, stop), daemon=True).start()
    # Loading stays on one thread; the engine's thread gets them all.
    torch.set_num_threads(1)
    loaded = load(config, log)
    runner, kernels, tokenizer = loaded.runner, loaded.kernels, loaded.tokenizer
    scheduler = PagedSessionScheduler(
        BlockPool(loaded.num_kv_blocks),
        block_size=config.block_size,
        max_step_tokens=loaded.max_step_tokens,
        max_step_rows=loaded.max_step_rows,
        max_context_tokens=loaded.config.max_context_tokens,
        plan=config.decode_plan,
        has_token_classes=runner.has_token_classes,
    )
    engine = Engine(
        scheduler=scheduler,
        runner=runner,
        tokenizer=tokenizer,
        max_replan_sessions=config.max_replan_sessions,
    )
    service = WorkerService(
        engine=engine,
        intake=Intake(tokenizer, _template(loaded)),
        model=_describe(config, loaded),
        version=importlib.metadata.version("pagecast"),
        num_kv_blocks=loaded.num_kv_blocks,
        log_tokens=lambda events: _log_tokens(log, events),
        log_gone=lambda num_sessions: log.warning("gateway_gone", num_sessions=num_sessions),
    )
    # From here on a signal means a clean stop; before, nothing is held that needs one.
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop.set)
    interceptors = [TokenInterceptor(token)] if token else []
    server = grpc.aio.server(interceptors=interceptors, options=_SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)
    try:
        server.add_insecure_port(config.listen)
    except RuntimeError:
        log.error("worker_failed", error=f"cannot listen on {config.listen}")
        return EXIT_LISTEN

    def prepare() -> None:
        if kernels.name == "native":  # its threads are the runner's, and torch computes next to nothing
            runner.warm_up()
            runner.release_plain_weights()
        else:
            torch.set_num_threads(config.num_threads)
            runner.warm_up()
        # All that is there by now stays. A full collection would walk it for 0.1 s while every stream waits.
        gc.collect()
        gc.freeze()
        give_back()

    def on_report(report: StepReport) -> None:
        loop.call_soon_threadsafe(service.deliver, report)

    def on_error(error: Exception, error_id: str) -> None:
        log.error("step_failed", error_id=error_id, exc_info=error)

    await asyncio.wrap_future(engine.start(prepare=prepare, on_report=on_report, on_error=on_error))
    if runner.widened_weights:
        log.info("weights_widened", stacks=[list(names) for names in runner.widened_weights])
    await server.start()
    log.info(
        "worker_ready",
        pid=os.getpid(),
        model=config.model,
        num_kv_blocks=loaded.num_kv_blocks,
        kv_bytes=loaded.kv_bytes,
        device=str(loaded.device),
        kernels=kernels.name,
        kernel_set=kernels.kernel_set,
        weights=loaded.weights,
        activations=loaded.activations,
        kv_dtype=loaded.kv_dtype,
        max_step_tokens=loaded.max_step_tokens,
        max_step_rows=loaded.max_step_rows,
        threads=config.num_threads,
    )
    engine_ended = asyncio.wrap_future(engine.ended)
    engine_ended.add_done_callback(lambda _: stop.set())
    await stop.wait()
    service.close()
    if engine_ended.done():  # by a bug: calls that wait for it would wait for ever
        await server.stop(0.0)
        await engine_ended
    await server.stop(_STOP_GRACE_S)
    engine.stop()
    log.info("worker_stopped", num_steps=engine.num_steps)
    return 0


def _template(loaded: Loaded) -> ChatTemplate | None:
    return None if loaded.chat_template is None else ChatTemplate(loaded.chat_template, loaded.tokenizer)


def _describe(config: WorkerConfig, loaded: Loaded) -> model_pb2.Model:
    return model_pb2.Model(
        name=Path(config.model).stem if config.model.endswith(".gguf") else config.model,
        architecture=loaded.architecture,
        num_parameters=loaded.num_parameters,
        vocab_size=loaded.tokenizer.vocab_size,
        max_context_tokens=loaded.config.max_context_tokens,
        block_size=config.block_size,
        numerics_fingerprint=loaded.fingerprint,
        has_chat_template=loaded.chat_template is not None,
    )


def _log_tokens(log: Log, events: Sequence[TokenDrawn]) -> None:
    """The token events of a step in the log; names and units are part of the public API."""
    if log.is_enabled_for(logging.INFO):
        log.info_all("token", [_token_values(event) for event in events])


def _token_values(event: TokenDrawn) -> dict[str, Any]:
    result = event.result
    return {
        "session_id": event.session_id,
        "generation_id": event.generation_id,
        "index": event.number,
        "token_id": event.drawn.token_id,
        "decode_plan": event.plan.name,
        "plan_action": result.plan_action.name,
        **({"itl_ns": event.itl_ns} if event.number else {"ttft_ns": event.since_start_ns}),
        "queue_ns": event.queue_ns,
        "plan_ns": result.plan_ns,
        "step_ns": result.step_ns,
        "kernel_ns": result.kernel_ns,
        "launches": result.launches,
        "host_bytes": result.host_bytes,
        "sample_ns": event.sample_ns,
        "batch_size": result.batch_size,
        "context_len": event.context_len,
    }


def _read_token(fd: int) -> str:
    """Return the parent's first line; it is there before this process is. Raises OSError without it."""
    received = b""
    while not received.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            raise OSError("the parent ended before it gave a token")
        received += byte
    return received.decode("ascii").strip()


def _watch_parent(fd: int, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Stop when the parent is gone: its end of the pipe closes whatever ended it."""
    while os.read(fd, 1):
        pass
    with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending already
        loop.call_soon_threadsafe(stop.set)
    threading.Event().wait(_ORPHAN_GRACE_S)
    os._exit(1)
