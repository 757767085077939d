"""The public API by its raw stubs: what goes out and what comes back, with nothing of the client library.

Knows requests, events and statuses; knows no server process.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagecast.v1 import (
    generation_pb2,
    generation_pb2_grpc,
    model_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)

TIMEOUT_S = 60.0
# What the workers' contexts hold, and so many tokens that a turn runs for seconds, until it is ended.
CONTEXT = 16_384
ENDLESS = 15_000
# A sampled turn may draw the EOS.
GO_ON: dict[str, Any] = {"ignore_eos": True}
Content = str | Sequence[int] | session_pb2.Input | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call that failed, as its status tells it; `field` is empty where no field is at fault."""

    status: grpc.StatusCode
    reason: str
    field: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A turn that finished, event by event."""

    started: generation_pb2.GenerationStarted
    chunks: tuple[generation_pb2.TokenChunk, ...]
    finished: generation_pb2.GenerationFinished

    @property
    def tokens(self) -> list[generation_pb2.Token]:
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(chunk.text_delta for chunk in self.chunks)

    @property
    def end(self) -> str:
        """The finish reason's name without its prefix."""
        name = generation_pb2.FinishReason.Name(self.finished.finish_reason)
        return name.removeprefix("FINISH_REASON_")


class Stream:
    """A turn that is read step by step."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._events: list[generation_pb2.GenerateResponse] = []

    def read(self) -> generation_pb2.GenerateResponse:
        """The next event."""
        event: generation_pb2.GenerateResponse = next(self.call)
        self._events.append(event)
        return event

    def read_tokens(self, count: int) -> str:
        """Read until so many tokens are there; the generation's id."""
        while sum(len(event.chunk.tokens) for event in self._events) < count:
            self.read()
        return self._events[0].started.generation_id

    def reply(self) -> Reply:
        """Read on to the end."""
        self._events += list(self.call)
        return reply_of(self._events)


def reply_of(events: Sequence[generation_pb2.GenerateResponse]) -> Reply:
    """Take a whole stream apart: one started, chunks without a gap, one finished."""
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) <= {"chunk"}
    chunks = tuple(event.chunk for event in events[1:-1])
    at = 0
    for chunk in chunks:
        assert not chunk.tokens or chunk.first_token_index == at
        at += len(chunk.tokens)
    assert events[-1].finished.usage.output_tokens == at
    return Reply(events[0].started, chunks, events[-1].finished)


def input_of(content: Content) -> session_pb2.Input | None:
    """A str is raw text, numbers are token ids, None continues the log."""
    if content is None or isinstance(content, session_pb2.Input):
        return content
    if isinstance(content, str):
        return session_pb2.Input(text=content)
    return session_pb2.Input(token_ids=session_pb2.TokenIds(ids=content))


def chat(*messages: tuple[str, str]) -> session_pb2.Input:
    """Messages of (role, content)."""
    return session_pb2.Input(
        messages=session_pb2.Messages(
            messages=[
                session_pb2.Message(role=session_pb2.Role.Value(f"ROLE_{role.upper()}"), content=content)
                for role, content in messages
            ]
        )
    )


class Api:
    """The three services over one channel.

    Args:
        channel: Stays the caller's to close.
        model: What sessions are opened on unless another is named.
    """

    def __init__(self, channel: grpc.Channel, model: str) -> None:
        self.channel = channel
        self.model = model
        self.sessions = session_pb2_grpc.SessionServiceStub(channel)
        self.generations = generation_pb2_grpc.GenerationServiceStub(channel)
        self.models = model_pb2_grpc.ModelServiceStub(channel)

    def open(self, **fields: Any) -> str:
        """Open a session; its id."""
        request = session_pb2.OpenSessionRequest(**{"model": self.model, **fields})
        return self.sessions.OpenSession(request, timeout=TIMEOUT_S).session.session_id

    def get(self, session_id: str) -> session_pb2.Session:
        request = session_pb2.GetSessionRequest(session_id=session_id)
        return self.sessions.GetSession(request, timeout=TIMEOUT_S).session

    def append(self, session_id: str, content: Content, **fields: Any) -> session_pb2.Session:
        request = session_pb2.AppendInputRequest(session_id=session_id, input=input_of(content), **fields)
        return self.sessions.AppendInput(request, timeout=TIMEOUT_S).session

    def update(self, session_id: str, **fields: Any) -> session_pb2.Session:
        request = session_pb2.UpdateSessionRequest(session_id=session_id, **fields)
        return self.sessions.UpdateSession(request, timeout=TIMEOUT_S).session

    def close(self, session_id: str, **fields: Any) -> session_pb2.Session:
        request = session_pb2.CloseSessionRequest(session_id=session_id, **fields)
        return self.sessions.CloseSession(request, timeout=TIMEOUT_S).session

    def cancel(self, session_id: str, generation_id: str, **fields: Any) -> None:
        request = generation_pb2.CancelGenerationRequest(
            session_id=session_id, generation_id=generation_id, **fields
        )
        self.generations.CancelGeneration(request, timeout=TIMEOUT_S)

    def stream(
        self,
        session_id: str,
        content: Content,
        *,
        timeout_s: float = TIMEOUT_S,
        max_tokens: int | None = None,
        stop: dict[str, Any] | None = None,
        sampling: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Stream:
        """Begin a turn; `stop` are further StoppingCriteria, `sampling` SamplingParams."""
        request = generation_pb2.GenerateRequest(
            session_id=session_id,
            input=input_of(content),
            stopping=generation_pb2.StoppingCriteria(max_tokens=max_tokens, **(stop or {})),
            sampling=session_pb2.SamplingParams(**(sampling or {})),
            **fields,
        )
        return Stream(self.generations.Generate(request, timeout=timeout_s))

    def turn(self, session_id: str, content: Content, **options: Any) -> Reply:
        """Run a whole turn; options as `stream` takes them."""
        return self.stream(session_id, content, **options).reply()

    @contextmanager
    def session(self, **fields: Any) -> Iterator[str]:
        """A session that is closed when the block ends."""
        session_id = self.open(**fields)
        try:
            yield session_id
        finally:
            self.close(session_id)

    def said(self, content: Content, *, session: dict[str, Any] | None = None, **options: Any) -> list[int]:
        """Ids of one turn on a session of its own, which is closed."""
        with self.session(**(session or {})) as session_id:
            return self.turn(session_id, content, **options).ids


def refusal_of(call: Callable[[], object]) -> Refusal:
    """Make a call that must fail, and read its status; the details have to be as the API promises."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return read_refusal(caught.value)


def read_refusal(error: Any) -> Refusal:
    """Read a failed call's status and check the form of its details."""
    status = rpc_status.from_call(error)
    if status is None:
        return Refusal(error.code(), "", "")
    assert len(status.SerializeToString()) < 1024
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    resource = error_details_pb2.ResourceInfo()
    for detail in status.details:
        for kind in (info, bad, resource):
            detail.Unpack(kind)
    assert info.domain == "pagecast"
    assert status.message
    field = info.metadata.get("field", "")
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        assert [violation.field for violation in bad.field_violations] == ([field] if field else [])
        assert all(violation.description for violation in bad.field_violations)
    if error.code() is grpc.StatusCode.NOT_FOUND:
        assert info.reason == f"{resource.resource_type.upper()}_NOT_FOUND"
    return Refusal(error.code(), info.reason, field)
