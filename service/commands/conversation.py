"""A conversation: one session at a time, turn by turn; and one without a terminal, a line a turn."""

import contextlib
import time
from collections.abc import Iterable
from typing import Self

from rich.console import Console

import pagecast
from pagecast.v1 import session_pb2
from service.commands.replies import Choices, open_session, stream, tell_limit, timing_line
from service.terminal import Output, Waiting

# What tells that the session is no more, whatever is tried on it.
SESSION_GONE = (
    pagecast.SessionClosed,
    pagecast.SessionExpired,
    pagecast.SessionFailed,
    pagecast.SessionNotFound,
    pagecast.WorkerLost,
)
# What ends a call on this side, while the server still has to hear of it.
_ENDED_HERE = (pagecast.Cancelled, pagecast.DeadlineExceeded, pagecast.BrokenStream)
_SETTLE_S = 2.0
_POLL_S = 0.05


class Conversation:
    """One session and what its turns have in common; leaving it closes the session.

    Args:
        client: Where to open sessions.
        choices: How turns run; `plan` holds for sessions to come, too.
        system: What each session begins with as a system message; None: nothing.
        console: Shows what is being waited for, where it is a terminal.

    Raises:
        CommandError: The model is not served, or none is named and there is none or a choice.
        pagecast.PagecastError: The session cannot be opened.
    """

    def __init__(
        self, client: pagecast.Client, choices: Choices, system: str | None, console: Console
    ) -> None:
        self._client = client
        self._choices = choices
        self._system = system
        self._console = console
        self.plan = choices.plan
        # By name from now on: while a lost worker is away, nobody says which models there are.
        self._model, self.session = open_session(client, choices, console)
        self._before = session_pb2.Session()  # as it was before the last turn

    def look(self) -> None:
        """See how the session is before the next turn."""
        self._before = self.session.get()

    def turn(self, text: str) -> pagecast.Generation:
        """Send a user message, after `look`; waits for nothing.

        A reply that is cut short stays in the history as far as it got.
        """
        content: pagecast.TurnInput = text
        # A turn that failed may have left nothing, and the system message not either.
        if self._system is not None and not self._before.num_tokens:
            content = [pagecast.Message("system", self._system), pagecast.Message("user", text)]
        options = self._choices.options | {"keep_partial": True}
        return self.session.generate(content, timeout_s=self._choices.timeout_s, **options)

    @property
    def has_history(self) -> bool:
        """Whether anything was there before the last turn."""
        return self._before.num_tokens > 0

    def stays(self, error: pagecast.PagecastError) -> bool | None:
        """Whether the last turn, whose reading raised `error`, is in the history as far as it got.

        Where the call was ended on this side, the server is given a moment to end the turn.

        Returns:
            None: it cannot be told.
        """
        until_s = time.monotonic() + (_SETTLE_S if isinstance(error, _ENDED_HERE) else 0.0)
        with contextlib.suppress(pagecast.PagecastError):
            while (now := self.session.get(timeout_s=_SETTLE_S)).revision == self._before.revision:
                if time.monotonic() > until_s:
                    # Tokens that are not committed are those of a turn that still runs.
                    return None if now.num_tokens > self._before.num_tokens else False
                time.sleep(_POLL_S)
            return True
        return None

    def use_plan(self, plan: pagecast.PagedDecodePlan) -> None:
        """Change how the decode step gets its plan, here and in sessions to come."""
        self.session.update(plan=plan)
        self.plan = plan

    def restart(self) -> None:
        """Go on in a new session, with an empty history.

        Raises:
            pagecast.PagecastError: None can be opened; the old one stays.
        """
        old, self.session = self.session, self._client.open_session(self._model, plan=self.plan)
        with contextlib.suppress(pagecast.PagecastError):  # it may be gone
            old.close()

    def waiting(self) -> Waiting:
        """Shows, within its block, that the server is being waited for."""
        return Waiting(self._console, "waiting for the server")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        # Whatever ended the conversation, and a session that is gone, matter more than closing it.
        with contextlib.suppress(*((pagecast.PagecastError,) if kind else SESSION_GONE)):
            self.session.close()


def chat_lines(
    conversation: Conversation, lines: Iterable[str], out: Output, console: Console, *, show_timing: bool
) -> None:
    """Run a turn for each line that is not blank, and write the replies, on lines of their own.

    Args:
        conversation: Where to run them.
        lines: One user message each.
        out: Where to.
        console: Takes the times.
        show_timing: Whether to tell each reply's.

    Raises:
        OutputError: `out` cannot be written to.
        pagecast.PagecastError: A turn failed; the ones before it have been written.
    """
    for line in lines:
        if not line.strip():
            continue
        conversation.look()
        with conversation.turn(line) as generation:
            stream(generation, out, console)
        tell_limit(generation.result, console)
        if show_timing:
            console.out(timing_line(generation.result), highlight=False)
