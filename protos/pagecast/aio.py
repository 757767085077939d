"""The asyncio client. Knows which call is which; `_aio_calls` makes them, `_requests` what they send."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Self, Unpack
from uuid import UUID

from pagecast import _requests, errors
from pagecast._aio_calls import AsyncGeneration, Connection
from pagecast.options import GenerateOptions, SessionOptions
from pagecast.v1 import model_pb2, session_pb2
from pagecast.values import Content, PagedDecodePlan, TurnInput


class AsyncClient:
    """`pagecast.Client` for asyncio: one connection, made by the first call, of one event loop.

    Every failed call raises from the tree of `pagecast.errors`.

    Args:
        target: HOST:PORT, or any other gRPC target.
        timeout_s: Deadline of each call but `generate`, in seconds.
    """

    def __init__(self, target: str = "127.0.0.1:7070", *, timeout_s: float = 30.0) -> None:
        self._connection = Connection(target, timeout_s)

    async def open_session(
        self, model: str, *, timeout_s: float | None = None, **options: Unpack[SessionOptions]
    ) -> "AsyncClientSession":
        """Open a session on a served model.

        Args:
            model: One of the names that `models` lists.
            timeout_s: Deadline of the call in seconds; None: the client's.
            **options: `pagecast.SessionOptions` says what else can be set.

        Raises:
            TypeError, ValueError: An option cannot be sent; nothing was.
        """
        request = _requests.open_session(model, **options)
        opened = await self._connection.call(self._connection.sessions.OpenSession, request, timeout_s)
        return self.session(opened.session.session_id)

    def session(self, session_id: str) -> "AsyncClientSession":
        """A handle on a session that is open already; asks the server nothing."""
        return AsyncClientSession(self._connection, session_id)

    async def models(self, *, timeout_s: float | None = None) -> Sequence[model_pb2.Model]:
        """The models that sessions can be opened on."""
        request = model_pb2.ListModelsRequest()
        return (await self._connection.call(self._connection.models.ListModels, request, timeout_s)).models

    def sessions(
        self, *, page_size: int | None = None, timeout_s: float | None = None
    ) -> AsyncIterator[session_pb2.Session]:
        """The sessions that the server knows, newest first; see `Client.sessions`."""
        return self._pages(_requests.list_sessions(page_size), timeout_s)

    async def tokenize(
        self, model: str, content: Content, *, raw: bool = False, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """The ids that an input of `generate` would begin a session's log with."""
        request = _requests.tokenize(model, content, raw=raw)
        answer = await self._connection.call(self._connection.models.Tokenize, request, timeout_s)
        return tuple(answer.token_ids)

    async def detokenize(
        self, model: str, token_ids: Sequence[int], *, timeout_s: float | None = None
    ) -> str:
        """The text that ids spell, special tokens left out."""
        request = _requests.detokenize(model, token_ids)
        return (await self._connection.call(self._connection.models.Detokenize, request, timeout_s)).text

    async def _pages(
        self, request: session_pb2.ListSessionsRequest, timeout_s: float | None
    ) -> AsyncIterator[session_pb2.Session]:
        while True:
            method = self._connection.sessions.ListSessions
            page = await self._connection.call(method, request, timeout_s)
            for session in page.sessions:
                yield session
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def close(self) -> None:
        """End the connection and the calls on it. Sessions stay open on the server."""
        await self._connection.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


class AsyncClientSession:
    """A session on the server; as an async context manager it closes the session on exit."""

    def __init__(self, connection: Connection, session_id: str) -> None:
        self.session_id = session_id
        self._connection = connection

    def generate(
        self,
        content: TurnInput,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGeneration:
        """Send one turn; see `ClientSession.generate`. Needs a running event loop."""
        request = _requests.generate(self.session_id, content, **options)
        return AsyncGeneration(self._connection, request, timeout_s)

    async def append(
        self,
        content: Content,
        *,
        raw: bool = False,
        expected_revision: int | None = None,
        request_id: str | UUID | None = None,
        timeout_s: float | None = None,
    ) -> session_pb2.Session:
        """Append input and have its KV computed; see `ClientSession.append`."""
        request = _requests.append_input(
            self.session_id, content, raw=raw, expected_revision=expected_revision, request_id=request_id
        )
        method = self._connection.sessions.AppendInput
        return (await self._connection.call(method, request, timeout_s)).session

    async def cancel(
        self,
        generation_id: str,
        *,
        request_id: str | UUID | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """End a running generation from outside: its stream ends with FinishReason.CANCELLED.

        With a `request_id` (a UUID) the same call once more gets the first answer.
        """
        request = _requests.cancel_generation(self.session_id, generation_id, request_id=request_id)
        await self._connection.call(self._connection.generations.CancelGeneration, request, timeout_s)

    async def get(self, *, timeout_s: float | None = None) -> session_pb2.Session:
        """The session as the server sees it now.

        While a turn runs `num_tokens` counts its input and what it has drawn so far, though the turn may
        still be rolled back; `revision` is the one before it.
        """
        request = _requests.get_session(self.session_id)
        return (await self._connection.call(self._connection.sessions.GetSession, request, timeout_s)).session

    async def update(
        self,
        *,
        plan: PagedDecodePlan | None = None,
        priority: int | None = None,
        labels: Mapping[str, str] | None = None,
        expected_revision: int | None = None,
        request_id: str | UUID | None = None,
        timeout_s: float | None = None,
    ) -> session_pb2.Session:
        """Change what is given, from the session's next step on, also in the middle of a generation."""
        request = _requests.update_session(
            self.session_id,
            plan=plan,
            priority=priority,
            labels=labels,
            expected_revision=expected_revision,
            request_id=request_id,
        )
        method = self._connection.sessions.UpdateSession
        return (await self._connection.call(method, request, timeout_s)).session

    async def close(
        self, *, request_id: str | UUID | None = None, timeout_s: float | None = None
    ) -> session_pb2.Session:
        """End the session and what runs in it; closing twice is no error, with or without `request_id`."""
        request = _requests.close_session(self.session_id, request_id=request_id)
        method = self._connection.sessions.CloseSession
        return (await self._connection.call(method, request, timeout_s)).session

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        # What went wrong inside matters more than that closing failed too.
        with contextlib.suppress(*([errors.PagecastError] if kind else [])):
            await self.close()
