"""The blocking client's channel and streams. Knows no session; what comes in and out is `_turn`'s."""

from collections.abc import Iterator
from typing import Self, TypeVar

import grpc

from pagecast import _checks, _failures, _requests, errors
from pagecast._turn import Turn
from pagecast.v1 import generation_pb2, generation_pb2_grpc, model_pb2_grpc, session_pb2_grpc
from pagecast.values import Chunk, Result

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


class Connection:
    """A channel and its stubs, shared by a client and its sessions."""

    def __init__(self, target: str, timeout_s: float) -> None:
        self.channel = grpc.insecure_channel(
            _checks.text("target", target), options=_requests.CHANNEL_OPTIONS
        )
        self.sessions = session_pb2_grpc.SessionServiceStub(self.channel)
        self.generations = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.models = model_pb2_grpc.ModelServiceStub(self.channel)
        self._timeout_s = _checks.timeout_s(timeout_s)

    def call(
        self,
        method: "grpc.UnaryUnaryMultiCallable[_Request, _Answer]",
        request: _Request,
        timeout_s: float | None,
    ) -> _Answer:
        """Make one call within `timeout_s`, or the client's own deadline."""
        deadline_s = self._timeout_s if timeout_s is None else _checks.timeout_s(timeout_s)
        try:
            return method(request, timeout=deadline_s)
        except grpc.RpcError as error:
            raise _failures.decode(error, deadline_s) from error


class Generation(Iterator[Chunk]):
    """One turn's tokens, as chunks in the order of arrival.

    Leaving it as a context manager cancels it, and so does dropping the last reference to it.
    """

    def __init__(
        self, connection: Connection, request: generation_pb2.GenerateRequest, timeout_s: float | None
    ) -> None:
        self._turn = Turn()
        self._timeout_s = _checks.timeout_s(timeout_s)
        self._call = connection.generations.Generate(request, timeout=self._timeout_s)

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
            for response in self._call:
                chunk = self._turn.fold(response)
                if chunk is not None:
                    return chunk
            self._turn.check_ended()
        except grpc.RpcError as error:
            raise self._failed(_failures.decode(error, self._timeout_s)) from error
        except errors.BrokenStream as error:
            self.cancel()
            raise self._failed(error) from None
        raise StopIteration

    def wait(self) -> Result:
        """Read to the end."""
        for _ in self:
            pass
        return self.result

    def cancel(self) -> None:
        """End the call now; reading on raises `Cancelled`. Does nothing once it has ended."""
        self._turn.is_cancelled = bool(self._call.cancel()) or self._turn.is_cancelled

    def _failed(self, error: errors.PagecastError) -> errors.PagecastError:
        self._turn.failure = str(error)
        return error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()
