"""The blocking client. Knows which call is which; `_calls` makes them, `_requests` what they send."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Self, Unpack
from uuid import UUID

from pagecast import _requests, errors
from pagecast._calls import Connection, Generation
from pagecast.options import GenerateOptions, SessionOptions
from pagecast.v1 import model_pb2, session_pb2
from pagecast.values import Content, PagedDecodePlan, TurnInput


class Client:
    """One connection to a Pagecast server, made by the first call; usable from several threads.

    Every failed call raises from the tree of `pagecast.errors`.

    Args:
        target: HOST:PORT, or any other gRPC target.
        timeout_s: Deadline of each call but `generate`, in seconds.
    """

    def __init__(self, target: str = "127.0.0.1:7070", *, timeout_s: float = 30.0) -> None:
        self._connection = Connection(target, timeout_s)

    def open_session(
        self, model: str, *, timeout_s: float | None = None, **options: Unpack[SessionOptions]
    ) -> "ClientSession":
        """Open a session on a served model.

        Args:
            model: One of the names that `models` lists.
            timeout_s: Deadline of the call in seconds; None: the client's.
            **options: `pagecast.SessionOptions` says what else can be set.

        Raises:
            TypeError, ValueError: An option cannot be sent; nothing was.
        """
        request = _requests.open_session(model, **options)
        opened = self._connection.call(self._connection.sessions.OpenSession, request, timeout_s)
        return self.session(opened.session.session_id)

    def session(self, session_id: str) -> "ClientSession":
        """A handle on a session that is open already; asks the server nothing."""
        return ClientSession(self._connection, session_id)

    def models(self, *, timeout_s: float | None = None) -> Sequence[model_pb2.Model]:
        """The models that sessions can be opened on."""
        request = model_pb2.ListModelsRequest()
        return self._connection.call(self._connection.models.ListModels, request, timeout_s).models

    def sessions(
        self, *, page_size: int | None = None, timeout_s: float | None = None
    ) -> Iterator[session_pb2.Session]:
        """The sessions that the server knows, newest first, asked for page by page as they are read.

        Args:
            page_size: Sessions of one page, at most 1000; None: the server's default.
            timeout_s: Deadline of each page's call in seconds; None: the client's.
        """
        return self._pages(_requests.list_sessions(page_size), timeout_s)

    def tokenize(
        self, model: str, content: Content, *, raw: bool = False, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """The ids that an input of `generate` would begin a session's log with."""
        request = _requests.tokenize(model, content, raw=raw)
        return tuple(self._connection.call(self._connection.models.Tokenize, request, timeout_s).token_ids)

    def detokenize(self, model: str, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """The text that ids spell, special tokens left out."""
        request = _requests.detokenize(model, token_ids)
        return self._connection.call(self._connection.models.Detokenize, request, timeout_s).text

    def _pages(
        self, request: session_pb2.ListSessionsRequest, timeout_s: float | None
    ) -> Iterator[session_pb2.Session]:
        while True:
            page = self._connection.call(self._connection.sessions.ListSessions, request, timeout_s)
            yield from page.sessions
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def close(self) -> None:
        """End the connection and the calls on it. Sessions stay open on the server."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ClientSession:
    """A session on the server; as a context manager it closes the session on exit."""

    def __init__(self, connection: Connection, session_id: str) -> None:
        self.session_id = session_id
        self._connection = connection

    def generate(
        self,
        content: TurnInput,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Send one turn; its tokens are read, and its errors raised, by iterating over what is returned.

        Args:
            content: A str is one user message through the model's chat template, or plain text with
                `raw`; token ids and messages are appended as such; None continues the log.
            timeout_s: Deadline of the whole generation in seconds; None: none.
            **options: `pagecast.GenerateOptions` says what else can be set.

        Raises:
            TypeError, ValueError: The input or an option cannot be sent; nothing was.
        """
        request = _requests.generate(self.session_id, content, **options)
        return Generation(self._connection, request, timeout_s)

    def append(
        self,
        content: Content,
        *,
        raw: bool = False,
        expected_revision: int | None = None,
        request_id: str | UUID | None = None,
        timeout_s: float | None = None,
    ) -> session_pb2.Session:
        """Append input and have its KV computed, so that a turn on it starts sooner.

        Args:
            content: As `generate` takes it; here None means nothing.
            raw: Append a str as it is. Otherwise it is one user message.
            expected_revision: Refuse with `RevisionMismatch` where the session has another one.
            request_id: A UUID; the same call once more with it appends nothing.
            timeout_s: Deadline of the call in seconds; None: the client's.

        Returns:
            The session with the input in its log.

        Raises:
            TypeError, ValueError: The input or an option cannot be sent; nothing was.
        """
        request = _requests.append_input(
            self.session_id, content, raw=raw, expected_revision=expected_revision, request_id=request_id
        )
        return self._connection.call(self._connection.sessions.AppendInput, request, timeout_s).session

    def cancel(
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
        self._connection.call(self._connection.generations.CancelGeneration, request, timeout_s)

    def get(self, *, timeout_s: float | None = None) -> session_pb2.Session:
        """The session as the server sees it now.

        While a turn runs `num_tokens` counts its input and what it has drawn so far, though the turn may
        still be rolled back; `revision` is the one before it.
        """
        request = _requests.get_session(self.session_id)
        return self._connection.call(self._connection.sessions.GetSession, request, timeout_s).session

    def update(
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
        return self._connection.call(self._connection.sessions.UpdateSession, request, timeout_s).session

    def close(
        self, *, request_id: str | UUID | None = None, timeout_s: float | None = None
    ) -> session_pb2.Session:
        """End the session and what runs in it; closing twice is no error, with or without `request_id`."""
        request = _requests.close_session(self.session_id, request_id=request_id)
        return self._connection.call(self._connection.sessions.CloseSession, request, timeout_s).session

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        # What went wrong inside matters more than that closing failed too.
        with contextlib.suppress(*([errors.PagecastError] if kind else [])):
            self.close()
