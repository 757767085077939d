"""Starts of `serve` that fail or are ended: what it says, and with what it exits."""

import signal
import socket
from pathlib import Path

import pytest

from tests.service.fake_worker import FakeWorker
from tests.service.served import start, story
from tests.tiny_model import write_tiny_gguf

# Sends itself a signal at a moment of its start.
EARLY = """
import json, os, sys
from service import server
from service.config import ServeSettings
from service.pool import local
def before(owner, name):
    real = getattr(owner, name)
    def signalled(*args, **kwargs):
        os.kill(os.getpid(), int(sys.argv[3]))
        return real(*args, **kwargs)
    setattr(owner, name, signalled)
owner, name = {
    "pool": (server, "_open_pool"), "supervisor": (local.subprocess, "Popen"), "bind": (server, "_bind"),
    "run": (server, "start_all"),
}[sys.argv[2]]
before(owner, name)
sys.exit(server.serve(ServeSettings(**json.loads(sys.argv[1]))))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["pool", "supervisor", "bind", "run"])
async def test_a_signal_at_any_moment_of_the_start_ends_it_in_order(
    number: signal.Signals, moment: str, tmp_path: Path
) -> None:
    served = await start(EARLY, moment, str(int(number)), model=str(tmp_path / "none.gguf"))
    assert await served.exit_code() == 0
    events = [event for event in story(served) if event != "worker_started"]
    assert events == ["gateway_starting", "gateway_stopped"][moment in ("pool", "supervisor") :]


async def test_a_port_in_use_is_one_clear_line_and_starts_no_worker(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        served = await start(model=str(tmp_path / "none.gguf"), workers=2, listen=listen)
        assert await served.exit_code() == 1
    (line,) = served.lines
    assert (line["event"], line["level"]) == ("gateway_failed", "error")
    assert f"cannot listen on {listen}" in line["error"]


async def test_a_port_of_another_gateway_is_one_clear_line(worker: FakeWorker) -> None:
    first = await start(worker_addresses=[worker.address])
    listen = (await first.wait_for("gateway_ready"))["listen"]
    second = await start(worker_addresses=[worker.address], listen=listen)
    assert await second.exit_code() == 1
    (line,) = second.lines
    assert line["event"] == "gateway_failed"
    assert f"cannot listen on {listen}" in line["error"]
    first.process.send_signal(signal.SIGTERM)
    assert await first.exit_code() == 0


async def test_an_address_of_no_machine_is_one_clear_line() -> None:
    served = await start(worker_addresses=["a:1"], listen="300.1.1.1:80")
    assert await served.exit_code() == 1
    (line,) = served.lines
    assert line["event"] == "gateway_failed"
    assert "cannot listen on 300.1.1.1:80" in line["error"]


async def test_a_worker_that_never_comes_is_one_clear_line(tmp_path: Path) -> None:
    served = await start(worker_addresses=[f"unix:{tmp_path}/none.sock"], start_timeout_s=0.5)
    assert await served.exit_code() == 1
    assert served.lines[-1]["event"] == "gateway_failed"
    assert "did not serve within 0.5 s" in served.lines[-1]["error"]


async def test_a_signal_ends_the_wait_for_workers(tmp_path: Path) -> None:
    served = await start(worker_addresses=[f"unix:{tmp_path}/none.sock"])
    await served.wait_for("gateway_starting")
    served.process.send_signal(signal.SIGTERM)
    assert await served.exit_code() == 0


@pytest.mark.e2e
async def test_a_worker_that_cannot_start_ends_the_gateway(tmp_path: Path) -> None:
    served = await start(model=str(tmp_path / "none.gguf"))
    assert await served.exit_code(timeout_s=60) == 1
    assert story(served) == ["gateway_starting", "worker_started", "worker_failed", "gateway_failed"]
    error = served.lines[-1]["error"]
    assert "exit code 3 before it served" in error
    assert error.endswith("it cannot use the model file")


@pytest.mark.e2e
async def test_a_pool_too_large_ends_the_gateway_and_names_the_flag(tmp_path: Path) -> None:
    # 1 MiB a block: 16 TiB, whatever the machine.
    model = write_tiny_gguf(tmp_path / "wide.gguf", num_heads=64, num_kv_heads=64, head_size=64)
    served = await start(model=str(model), kv_blocks=2**24)
    assert await served.exit_code(timeout_s=60) == 1
    assert story(served) == ["gateway_starting", "worker_started", "worker_failed", "gateway_failed"]
    (failed,) = [line for line in served.lines if line["event"] == "worker_failed"]
    assert "lower --kv-blocks" in failed["error"]
