"""`python -m worker` as a process: whatever goes wrong is one event of its log and an exit status."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from pagecast.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.tiny_model import write_tiny_gguf

# Makes one thing of the worker fail, then runs it as `python -m worker` does.
BROKEN = """
import sys
from worker.__main__ import main
from worker.config import prepare_process
prepare_process()
import worker.runner
def broken(self):
    {breakage}
worker.runner.Runner.warm_up = broken
sys.exit(main(sys.argv[1:]))
"""


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from worker.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


def run(*flags: str, code: str | None = None, **env: str) -> tuple[int, str]:
    """Run a worker that cannot start; its exit status and all of its standard error."""
    start = ["-m", "worker"] if code is None else ["-c", code]
    done = subprocess.run(
        [sys.executable, *start, *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**{name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}, **env},
    )
    return done.returncode, done.stderr


def failure(text: str) -> dict[str, Any]:
    """The only line of a log, which has to be a `worker_failed` event."""
    (line,) = text.splitlines()
    event: dict[str, Any] = json.loads(line)
    assert (event["event"], event["level"]) == ("worker_failed", "error")
    return event


def listen(folder: Path) -> str:
    return f"unix:{folder}/w.sock"


def test_a_pool_too_large_says_what_it_takes_and_what_to_do(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "wide.gguf", num_heads=64, num_kv_heads=64, head_size=64)
    status, text = run("--model", str(path), "--listen", listen(tmp_path), "--kv-blocks", str(2**24))
    assert status == 7
    # 2 layers of keys and values, 16 tokens a block, 64 heads of 64, 2 bytes each.
    assert f"takes {2**24 * 2 * 2 * 16 * 64 * 64 * 2} bytes" in failure(text)["error"]
    assert "lower --kv-blocks" in failure(text)["error"]


def test_a_context_beyond_reason_is_refused_with_the_file(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "long.gguf", max_context_tokens=2**32 - 1)
    status, text = run("--model", str(path), "--listen", listen(tmp_path))
    assert status == 3
    assert "long.gguf: max_context_tokens 4294967295" in failure(text)["error"]


@pytest.mark.parametrize("where", ["port in use", "300.1.1.1:80"])
def test_an_address_that_cannot_be_taken(where: str, tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}" if where == "port in use" else where
        status, text = run("--model", str(tiny), "--listen", address)
    assert status == 4
    assert f"cannot listen on {address}" in failure(text)["error"]


@pytest.mark.parametrize(
    ("breakage", "status", "told"),
    [
        ("raise worker.runner.RowsNotInvariant('linear: other bits')", 5, "linear: other bits"),
        ("raise RuntimeError('first line\\nsecond')", 1, "RuntimeError: first line\nsecond"),
        ("raise MemoryError", 1, "MemoryError"),
        (
            "import torch; raise torch.OutOfMemoryError('no room for 7 GiB')",
            7,
            "lower --kv-blocks or --max-step-tokens",
        ),
    ],
)
def test_a_failed_warm_up(breakage: str, status: int, told: str, tiny: Path, tmp_path: Path) -> None:
    code = BROKEN.format(breakage=breakage)
    actual, text = run("--model", str(tiny), "--listen", listen(tmp_path), code=code)
    assert actual == status
    assert told in failure(text)["error"]
    assert ("exception" in failure(text)) is (status == 1)


def test_a_missing_package_is_named_with_what_to_install(tmp_path: Path) -> None:
    status, text = run("--listen", listen(tmp_path), code=WITHOUT_TORCH)
    assert status == 6
    assert failure(text)["error"].startswith("a worker needs torch: install the extra `worker`")
    assert "pip install '.[worker]'" in failure(text)["error"]


def test_a_folder_for_a_model_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").mkdir()
    status, text = run("--model", str(tmp_path / "x.gguf"), "--listen", listen(tmp_path))
    assert status == 3
    assert failure(text)["error"] == "x.gguf: is a folder, not a .gguf file"


def test_wrong_flags_are_usage_text_for_a_person_and_an_event_for_a_gateway(tmp_path: Path) -> None:
    flags = ["--listen", listen(tmp_path), "--kv-blocks", "99999999999"]
    status, text = run(*flags)
    assert status == 2
    assert text.startswith("Usage: ")
    status, text = run(*flags, "--parent-fd", "0")
    assert status == 2
    assert "'--kv-blocks'" in failure(text)["error"]
    status, text = run("--listen", "x", "--max-step-tokens", "2", "--max-step-rows", "3", "--parent-fd=0")
    assert status == 2
    assert failure(text)["error"] == "--max-step-rows is over --max-step-tokens"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--device", "cuda"], "--device cuda: torch"),
        (
            ["--device", "cpu", "--kv-dtype", "float8_e4m3fn"],
            "--kv-dtype float8_e4m3fn needs --kernels triton",
        ),
        (["--device", "cpu", "--kernels", "triton", "--kv-dtype", "bfloat16"], "--kv-dtype bfloat16 needs"),
        (
            ["--device", "cpu", "--max-step-rows", "65"],
            "--max-step-rows 65 is over --max-step-tokens, here 64",
        ),
    ],
)
def test_what_this_machine_cannot_do_is_refused_by_the_flags_name(
    flags: list[str], told: str, tiny: Path, tmp_path: Path
) -> None:
    if flags == ["--device", "cuda"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, text = run("--model", str(tiny), "--listen", listen(tmp_path), *flags)
    assert status == 2
    assert failure(text)["error"].startswith(told)


def test_grpc_stays_as_the_operator_set_it(tiny: Path) -> None:
    status, text = run("--model", str(tiny), "--listen", "300.1.1.1:80", GRPC_VERBOSITY="ERROR")
    assert status == 4
    assert "add_port.cc" in text


def worker_command(model: Path, folder: Path) -> list[str]:
    return [sys.executable, "-m", "worker", "--model", str(model), "--listen", listen(folder)]


def test_a_parent_that_ends_before_it_gave_a_token_is_told(tiny: Path, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(write_end)
    try:
        done = subprocess.run(
            [*worker_command(tiny, tmp_path), "--parent-fd", str(read_end)],
            capture_output=True, text=True, timeout=60, check=False, pass_fds=(read_end,),
        )  # fmt: skip
    finally:
        os.close(read_end)
    assert done.returncode == 1
    assert "the parent ended before it gave a token" in failure(done.stderr)["error"]


@pytest.mark.parametrize("token", ["", "0123abcd"])
def test_a_worker_asks_for_its_parents_token_and_ends_with_its_parent(
    tiny: Path, tmp_path: Path, token: str
) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, f"{token}\n".encode())
    process = subprocess.Popen(
        [*worker_command(tiny, tmp_path), "--parent-fd", str(read_end), "--threads", "1"],
        stderr=subprocess.PIPE, text=True, pass_fds=(read_end,),
    )  # fmt: skip
    os.close(read_end)
    assert process.stderr is not None
    ready = json.loads(process.stderr.readline())
    assert (ready["event"], ready["pid"]) == ("worker_ready", process.pid)
    with grpc.insecure_channel(listen(tmp_path)) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        request = worker_pb2.GetWorkerInfoRequest()
        info = stub.GetWorkerInfo(request, timeout=5.0, metadata=(("pagecast-token", token),))
        assert info.model.name == "tiny"
        if token:
            with pytest.raises(grpc.RpcError) as refused:
                stub.GetWorkerInfo(request, timeout=5.0)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        else:
            stub.GetWorkerInfo(request, timeout=5.0)
    os.close(write_end)
    assert process.wait(5) in (0, 1)
    process.stderr.close()


# Outside of every turn: no call of this worker would ever be answered again.
BROKEN_ENGINE = """
import sys
from worker.__main__ import main
from worker.config import prepare_process
prepare_process()
import worker.scheduler
def broken(self):
    raise RuntimeError("no order of turns")
worker.scheduler.PagedSessionScheduler.schedule = broken
sys.exit(main(sys.argv[1:]))
"""


def test_a_worker_whose_engine_died_ends_so_that_another_takes_its_place(tiny: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BROKEN_ENGINE, *worker_command(tiny, tmp_path)[3:]],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert json.loads(process.stderr.readline())["event"] == "worker_ready"
    with grpc.insecure_channel(listen(tmp_path)) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        stub.OpenSession(worker_pb2.OpenSessionRequest(session_id="s"), timeout=5.0)
        turn = worker_pb2.SubmitRequest(generation_id="g", session_id="s")
        turn.input.token_ids.ids.append(1)
        stub.Submit(turn, timeout=5.0)
        assert process.wait(10) == 1
    events = [json.loads(line) for line in process.stderr]
    process.stderr.close()
    assert [event["event"] for event in events] == ["step_failed", "worker_failed"]
    assert "no order of turns" in events[-1]["error"]
