"""The life of the processes: start, logs, health, reflection, stop."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

import pagecast
from pagecast.v1 import generation_pb2, generation_pb2_grpc, session_pb2, session_pb2_grpc
from tests.e2e.processes import wait_until_gone
from tests.e2e.server import RunningServer, running_server

pytestmark = pytest.mark.e2e
SERVICES = ("SessionService", "GenerationService", "ModelService")


def test_every_token_and_generation_is_logged_without_text(
    client: pagecast.Client, tiny_server: RunningServer
) -> None:
    with client.open_session("tiny", plan=pagecast.REPLAN) as session:
        turn = session.generate("a secret canary phrase", max_tokens=6).wait()
        generation = tiny_server.wait_for_event("generation", session_id=session.session_id)
        tiny_server.wait_for_event("token", generation_id=turn.generation_id, index=5)
    tokens = [e for e in tiny_server.events("token") if e["generation_id"] == turn.generation_id]
    assert [token["token_id"] for token in tokens] == list(turn.token_ids)
    common = {"session_id", "decode_plan", "plan_action", "queue_ns", "plan_ns", "step_ns", "sample_ns"}
    common |= {"kernel_ns", "launches", "host_bytes"}
    common |= {"batch_size", "context_len", "ts", "index", "token_id", "generation_id", "event"}
    assert set(tokens[0]) == common | {"ttft_ns"}
    assert all(set(token) == common | {"itl_ns"} for token in tokens[1:])
    assert {token["plan_action"] for token in tokens} == {"REPLANNED"}
    assert [token["context_len"] for token in tokens] == list(
        range(len(turn.input_token_ids), len(turn.input_token_ids) + 6)
    )
    assert generation["output_tokens"] == 6
    assert generation["finish_reason"] == "MAX_TOKENS"
    assert {
        "ttft_ns",
        "tpot_ns",
        "e2e_ns",
        "input_tokens",
        "cached_tokens",
        "plan_builds",
        "plan_reuses",
        "plan_replans",
    } <= set(generation)
    assert "canary" not in tiny_server.log_path.read_text()


def test_workers_run_native_kernels_unless_told_otherwise(
    client: pagecast.Client, tiny_server: RunningServer
) -> None:
    (ready,) = tiny_server.events("worker_ready")
    assert ready["kernels"] == "native"
    assert ready["kernel_set"]
    assert tiny_server.events("kernels_fallback") == []
    (model,) = client.models()
    assert "/native-" in model.numerics_fingerprint


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_health_and_reflection_name_every_service(tiny_server: RunningServer, version: str) -> None:
    names = [f"pagecast.v1.{name}" for name in SERVICES]
    with grpc.insecure_channel(tiny_server.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        listed = health.List(health_pb2.HealthListRequest(), timeout=5.0).statuses
        assert set(listed) == {"", *names}
        for name in ("", *names):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5.0)
            assert answer.status == listed[name].status == health_pb2.HealthCheckResponse.SERVING
        method = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=names[0]),
        ]
        services, files = method(iter(requests), timeout=5.0)
        assert set(names) <= {service.name for service in services.list_services_response.service}
        assert any(b"SessionService" in file for file in files.file_descriptor_response.file_descriptor_proto)


def test_what_is_not_implemented_says_so_by_name(tiny_server: RunningServer) -> None:
    with grpc.insecure_channel(tiny_server.target) as channel:
        sessions = session_pb2_grpc.SessionServiceStub(channel)
        generations = generation_pb2_grpc.GenerationServiceStub(channel)
        opened = sessions.OpenSession(session_pb2.OpenSessionRequest(model="tiny"), timeout=5.0).session
        wanted = {
            "ForkSession": lambda: sessions.ForkSession(
                session_pb2.ForkSessionRequest(session_id=opened.session_id), timeout=5.0
            ),
            "ttl": lambda: sessions.OpenSession(
                session_pb2.OpenSessionRequest(model="tiny", ttl={"seconds": 5}), timeout=5.0
            ),
            "disconnect_policy": lambda: list(
                generations.Generate(
                    generation_pb2.GenerateRequest(
                        session_id=opened.session_id,
                        input=session_pb2.Input(text="a"),
                        disconnect_policy=generation_pb2.DISCONNECT_POLICY_CONTINUE,
                    ),
                    timeout=5.0,
                )
            ),
        }
        for name, call in wanted.items():
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert name in refused.value.details()


def test_sigterm_ends_gateway_and_worker_cleanly(tiny_path: Path, tmp_path: Path) -> None:
    with running_server(tmp_path, "--model", str(tiny_path)) as server:
        processes = [server.supervisor_pid(), *server.worker_pids()]
        assert len(processes) == 2
        assert server.stop() == 0
        wait_until_gone(processes, 2.0)
        assert server.events("worker_stopped")
        assert server.events("gateway_stopped")
        assert "Traceback" not in server.log_path.read_text()


def test_g08_a_second_server_on_a_port_is_refused(tiny_server: RunningServer, tiny_path: Path) -> None:
    command = [sys.executable, "-m", "service.cli", "serve", "--listen", tiny_server.target]
    second = subprocess.run(
        [*command, "--model", str(tiny_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert second.returncode == 1
    (event,) = [json.loads(line) for line in second.stderr.splitlines()]
    assert event["event"] == "gateway_failed"
    assert tiny_server.target in event["error"]


def test_g12_a_model_that_cannot_be_read_stops_the_start_and_is_named(
    tmp_path: Path, tiny_path: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_path.read_bytes()[:-1000])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "service.cli", "serve", "--listen", f"127.0.0.1:{port}"]
    failed = subprocess.run(
        [*command, "--model", str(cut)], capture_output=True, text=True, timeout=60, check=False
    )
    assert failed.returncode == 1
    events = [json.loads(line) for line in failed.stderr.splitlines()]
    expected = ["gateway_starting", "worker_started", "worker_failed", "gateway_failed"]
    assert [event["event"] for event in events] == expected
    assert "cut.gguf" in events[2]["error"]
