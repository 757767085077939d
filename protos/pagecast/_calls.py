"""The blocking client's channel and streams. Knows no session; what comes in and out is `_turn`'s.

All that is gRPC's is done by `_grpc_thread`, out of reach of signals.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from queue import Empty
from typing import Self, TypeVar

import grpc

from pagecast import _checks, _requests, errors
from pagecast._grpc_thread import GrpcThread, Stream
from pagecast._turn import Turn
from pagecast.v1 import generation_pb2, generation_pb2_grpc, model_pb2_grpc, session_pb2_grpc
from pagecast.values import Chunk, Result

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")
# Closing is at once; should it ever not be, whoever ends a program must not wait for it.
_CLOSE_TIMEOUT_S = 5.0


class Connection:
    """A channel and its stubs, shared by a client and its sessions."""

    def __init__(self, target: str, timeout_s: float) -> None:
        self._timeout_s = _checks.timeout_s(timeout_s)
        self._channel = grpc.insecure_channel(
            _checks.text("target", target), options=_requests.CHANNEL_OPTIONS
        )
        self.sessions = session_pb2_grpc.SessionServiceStub(self._channel)
        self.generations = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self.models = model_pb2_grpc.ModelServiceStub(self._channel)
        self.thread = GrpcThread()

    def call(
        self,
        method: "grpc.UnaryUnaryMultiCallable[_Request, _Answer]",
        request: _Request,
        timeout_s: float | None,
    ) -> _Answer:
        """Make one call within `timeout_s`, or the client's own deadline."""
        deadline_s = self._timeout_s if timeout_s is None else _checks.timeout_s(timeout_s)
        return self.thread.call(partial(method.future, request, timeout=deadline_s), deadline_s)

    def close(self) -> None:
        """End the channel and the calls on it."""
        with contextlib.suppress(Empty):
            self.thread.run(self._channel.close, _CLOSE_TIMEOUT_S)


class Generation(Iterator[Chunk]):
    """One turn's tokens, as chunks in the order of arrival.

    Leaving it as a context manager cancels it, and so does dropping the last reference to it.
    """

    def __init__(
        self, connection: Connection, request: generation_pb2.GenerateRequest, timeout_s: float | None
    ) -> None:
        timeout_s = _checks.timeout_s(timeout_s)
        self._turn = Turn()
        start = partial(connection.generations.Generate, request, timeout=timeout_s)
        self._stream: Stream[generation_pb2.GenerateResponse] = Stream(connection.thread, start, timeout_s)

    @property
    def generation_id(self) -> str | None:
        """The id to cancel it by; None until the server has announced it."""
        return self._turn.generation_id

    @property
    def text(self) -> str:
        """The text so far; it stays there when reading on raises."""
        return self._turn.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids so far; they stay there when reading on raises."""
        return self._turn.token_ids

    @property
    def result(self) -> Result:
        """The finished turn. Raises RuntimeError, which says why, where there is none."""
        return self._turn.require_result()

    def __next__(self) -> Chunk:
        try:
            while (response := self._stream.next()) is not None:
                # What had been read ahead of a cancel is not given out after it.
                chunk = None if self._turn.is_cancelled else self._turn.fold(response)
                if chunk is not None:
                    return chunk
            self._turn.check_ended()
        except errors.BrokenStream as error:
            self.cancel()
            raise self._failed(error) from None
        except errors.PagecastError as error:
            self._failed(error)
            raise
        raise StopIteration

    def wait(self) -> Result:
        """Read to the end."""
        for _ in self:
            pass
        return self.result

    def cancel(self) -> None:
        """End the call now; reading on raises `Cancelled`. Does nothing once it has ended."""
        self._turn.is_cancelled = self._stream.cancel() or self._turn.is_cancelled

    def _failed(self, error: errors.PagecastError) -> errors.PagecastError:
        self._turn.failure = str(error)
        return error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()
