"""Bad input over gRPC: each is refused with its status, reason and field, and changes nothing."""

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor

from pagecast.v1 import generation_pb2, model_pb2, session_pb2
from tests.e2e.bad_calls import GOOD_SAMPLING, BadCall, bad_calls
from tests.e2e.calls import ENDLESS, GO_ON, Api, Refusal, refusal_of
from tests.e2e.rig import Rig
from tests.tiny_model import write_tiny_gguf

pytestmark = pytest.mark.e2e
INVALID = grpc.StatusCode.INVALID_ARGUMENT
FILES = (session_pb2.DESCRIPTOR, generation_pb2.DESCRIPTOR, model_pb2.DESCRIPTOR)
METHODS = [
    method
    for file in FILES
    for service in file.services_by_name.values()
    for method in service.methods_by_name.values()
]
# Not in this version: nothing of a request is looked at.
NOT_HERE = {"ForkSession", "TruncateSession", "SuspendSession", "ResumeSession", "AttachGeneration"}
ENUM_ROWS = {
    "OpenSessionRequest.decode_plan": "open plan 99",
    "OpenSessionRequest.initial_input": "open role",
    "UpdateSessionRequest.decode_plan": "update plan 99",
    "AppendInputRequest.input": "append role",
    "GenerateRequest.input": "generate role",
    "GenerateRequest.cancel_policy": "generate cancel_policy 99",
    "GenerateRequest.disconnect_policy": "generate disconnect_policy 99",
    "TokenizeRequest.input": "tokenize role",
}
CALLS = bad_calls()


@dataclass(frozen=True, slots=True)
class Victim:
    """Two sessions that nothing may happen to: one with a log, one without."""

    log: str
    new: str


@pytest.fixture(scope="module")
def victim(rig: Rig) -> Iterator[Victim]:
    api = rig.api("plain")
    with api.session(labels={"a": "b"}) as log, api.session() as new:
        api.turn(log, "some words", max_tokens=5)
        yield Victim(log, new)


def state(rig: Rig, victim: Victim) -> tuple[Any, ...]:
    """All that a call could change, as far as the API and the worker tell it."""
    api, info = rig.api("plain"), rig.workers["plain"].info()
    listed = api.sessions.ListSessions(session_pb2.ListSessionsRequest(page_size=1000)).sessions
    return (
        *(api.get(name).SerializeToString(deterministic=True) for name in (victim.log, victim.new)),
        [session.session_id for session in listed],
        info.num_free_kv_blocks,
        info.num_steps,
    )


@pytest.mark.parametrize("bad", CALLS, ids=lambda bad: bad.name)
def test_a_bad_call_is_refused_by_its_field_and_changes_nothing(
    rig: Rig, victim: Victim, bad: BadCall
) -> None:
    before = state(rig, victim)
    assert refusal_of(lambda: bad.call(rig.api("plain"), victim.log, victim.new)) == bad.refusal
    assert state(rig, victim) == before


def test_after_all_of_it_the_server_serves_as_before(rig: Rig, victim: Victim) -> None:
    api = rig.api("plain")
    sampling = {"temperature": 1.0, "seed": 3}
    expected = api.said("as before", max_tokens=30, sampling=sampling)
    num_free = rig.workers["plain"].num_free
    for bad in CALLS:
        refusal_of(lambda bad=bad: bad.call(api, victim.log, victim.new))
    assert api.said("as before", max_tokens=30, sampling=sampling) == expected
    assert rig.workers["plain"].num_free == num_free
    assert rig.server.events("internal_error") == []


def test_every_enum_of_every_request_is_in_the_table() -> None:
    names = {bad.name for bad in CALLS}
    assert set(ENUM_ROWS.values()) <= names
    requests = [method.input_type for method in METHODS if method.name not in NOT_HERE]
    assert {f"{request.name}.{field}" for request in requests for field in enum_fields(request)} == set(
        ENUM_ROWS
    )


def enum_fields(message: Descriptor) -> set[str]:
    """Fields of a message that are enums or hold some at any depth."""
    return {
        field.name
        for field in message.fields
        if field.type == FieldDescriptor.TYPE_ENUM or (field.message_type and enum_fields(field.message_type))
    }


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_malformed_bytes_are_told_on_every_rpc(api: Api, method: MethodDescriptor) -> None:
    strings = [field for field in method.input_type.fields if field.type == FieldDescriptor.TYPE_STRING]
    # An end in the middle of a tag, and a string that is no UTF-8.
    for data in [b"\xff\xff\xff", *(bytes([8 * field.number + 2, 2, 0xC3, 0x28]) for field in strings[:1])]:
        assert refusal_of(lambda data=data: send(api, method, data)) == Refusal(
            INVALID, "MALFORMED_MESSAGE", ""
        )


def send(api: Api, method: MethodDescriptor, data: bytes) -> None:
    """Call a method with these bytes."""
    name = f"/{method.containing_service.full_name}/{method.name}"
    if method.server_streaming:
        list(api.channel.unary_stream(name)(data, timeout=10.0))
    else:
        api.channel.unary_unary(name)(data, timeout=10.0)


@pytest.mark.parametrize("method", ["Generate", "AppendInput", "Tokenize"])
def test_text_over_the_message_limit_is_grpcs_own_refusal(api: Api, victim: Victim, method: str) -> None:
    text = session_pb2.Input(text="a" * 10_000_000)
    calls: dict[str, Any] = {
        "Generate": lambda: api.turn(victim.log, text),
        "AppendInput": lambda: api.append(victim.log, text),
        "Tokenize": lambda: api.models.Tokenize(model_pb2.TokenizeRequest(model="plain", input=text)),
    }
    assert refusal_of(calls[method]) == Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "", "")
    assert api.said("still here", max_tokens=1)


def test_text_under_the_message_limit_is_refused_at_once(api: Api, victim: Victim) -> None:
    for unit in ("a", "é ", "🙂"):
        text = unit * (3_900_000 // len(unit.encode()))
        started_s = time.monotonic()
        assert refusal_of(lambda text=text: api.turn(victim.log, text)).reason == "PROMPT_TOO_LONG"
        assert time.monotonic() - started_s < 2.0


def test_a_second_turn_of_a_busy_session_is_aborted(api: Api) -> None:
    with api.session() as session_id:
        stream = api.stream(session_id, [3] * 10, max_tokens=ENDLESS)
        generation_id = stream.read_tokens(1)
        for call in (lambda: api.turn(session_id, "b"), lambda: api.append(session_id, "b")):
            assert refusal_of(call) == Refusal(grpc.StatusCode.ABORTED, "SESSION_BUSY", "")
        api.cancel(session_id, generation_id)
        reply = stream.reply()
        assert reply.end == "CANCELLED"
        assert api.turn(session_id, [3] * 10, max_tokens=len(reply.ids)).ids == reply.ids


@pytest.mark.parametrize("name", GOOD_SAMPLING)
def test_the_edges_of_sampling_are_taken_and_told(api: Api, name: str) -> None:
    for value in GOOD_SAMPLING[name]:
        given: dict[str, Any] = {name: value}
        sampling = session_pb2.SamplingParams(**given)
        with api.session(default_sampling=sampling) as session_id:
            for reply in (
                api.turn(session_id, "a", max_tokens=2, stop=GO_ON),
                api.turn(session_id, "a", max_tokens=2, stop=GO_ON, sampling=given),
            ):
                assert getattr(reply.started.sampling, name) == getattr(sampling, name)
                assert len(reply.ids) == 2


def test_the_edges_of_everything_else_are_taken(api: Api) -> None:
    week = {"seconds": 7 * 24 * 3600}
    bias = {token: (-100.0 if token % 2 else 100.0) for token in range(272)}
    labels = {f"{number:02}" + "k" * 254: "ä" * 128 for number in range(64)}
    upper_id = str(uuid.uuid4()).upper()
    with api.session(labels=labels, request_id=upper_id, max_context_tokens=8) as session_id:
        assert dict(api.get(session_id).labels) == labels
        reply = api.turn(
            session_id,
            [271, 3],
            max_tokens=6,
            stop={
                "min_tokens": 6,
                "stop_sequences": [chr(0x100 + number) * 128 for number in range(16)],
                "stop_token_ids": range(208, 272),
            },
            sampling={"logit_bias": bias},
            queue_timeout=week,
            time_limit=week,
            priority=-(2**31),
        )
        assert len(reply.ids) == 6
        assert all(token % 2 == 0 for token in reply.ids)
    with api.session(max_context_tokens=2**32 - 1, priority=2**31 - 1) as session_id:
        assert api.turn(session_id, [5], max_tokens=2**32 - 1, stop={"stop_token_ids": range(3, 67)}).ids
    with api.session(max_context_tokens=1) as session_id:
        assert refusal_of(lambda: api.turn(session_id, [5])).reason == "PROMPT_TOO_LONG"
    for size in (1, 1000):
        api.sessions.ListSessions(session_pb2.ListSessionsRequest(page_size=size))


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def other_width(data: bytes) -> bytes:
    return with_size(data, "llama.feed_forward_length", 160)


def more_layers(data: bytes) -> bytes:
    return with_size(data, "llama.block_count", 3)


def with_size(data: bytes, key: str, value: int) -> bytes:
    """The file with another number at a key; a uint32 follows its key and its type, 4."""
    at = data.index(key.encode()) + len(key)
    assert data[at : at + 4] == (4).to_bytes(4, "little")
    return data[: at + 4] + value.to_bytes(4, "little") + data[at + 8 :]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncated, "damaged or truncated GGUF"),
        (other_width, "tensor blk.0.ffn_gate.weight has shape [128, 64], expected [160, 64]"),
        (more_layers, "tensor blk.2.attn_norm.weight is missing"),
    ],
)
def test_a_damaged_model_file_is_refused_at_start_by_its_name(
    tmp_path: Path, damage: Callable[[bytes], bytes], said: str
) -> None:
    path = write_tiny_gguf(tmp_path / "damaged.gguf")
    path.write_bytes(damage(path.read_bytes()))
    command = [sys.executable, "-m", "service.cli", "serve", "--listen", "127.0.0.1:0", "--model", str(path)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    events = {event["event"]: event for event in map(json.loads, done.stderr.splitlines())}
    assert events["worker_failed"]["error"].startswith(f"damaged.gguf: {said}")
    assert "exit code 3" in events["gateway_failed"]["error"]
    assert "gateway_ready" not in events
