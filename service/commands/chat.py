"""A conversation at a terminal: prompt, streamed reply, commands. Knows no flags and no exit codes."""

import time

from rich.console import Console

import pagecast
from service.commands.conversation import SESSION_GONE, Conversation
from service.commands.interrupts import cancel_on_interrupt
from service.commands.replies import stream, timing_line
from service.commands.sessions import details
from service.terminal import LineDiscarded, Output, read_line, visible

PROMPT = "> "
PLANS = {"once": pagecast.PLAN_ONCE, "replan": pagecast.REPLAN}
# A worker that is restarted loads its model first.
REOPEN_TIMEOUT_S = 60.0
HELP = """\
/plan once|replan   how the decode step gets its plan, from the next token on
/info               the session's numbers
/new                a new session, with an empty history
/help               this
/quit               end (so do Ctrl-D, and Ctrl-C at an empty prompt)
Ctrl-C during a reply cuts it short; what was shown stays in the history.
A message that begins with / is sent if it begins with //.
"""


def chat_terminal(conversation: Conversation, out: Output, console: Console, *, show_timing: bool) -> None:
    """Talk until the user ends it.

    A turn that fails is told and the conversation goes on; where its session is gone, in a new one.

    Args:
        conversation: Where to run the turns.
        out: Takes the replies.
        console: Takes everything else.
        show_timing: Whether to tell each reply's times.

    Raises:
        KeyboardInterrupt: Ctrl-C at an empty prompt.
        OutputError: `out` cannot be written to.
        pagecast.Unavailable: The server is gone, or no worker came back in time.
    """
    _tell(console, "/help lists the commands")
    while (line := _line(console)) is not None:
        text = line.strip()
        if text in {"/quit", "/exit"}:
            return
        if not text:
            continue
        try:
            if text.startswith("/") and not text.startswith("//"):
                _command(text, conversation, out, console)
            else:
                message = text.removeprefix("/") if text.startswith("//") else line
                _reply(conversation, message, out, console, show_timing=show_timing)
        except SESSION_GONE as error:
            _tell(console, f"the session is gone ({error}): a new one begins, with an empty history")
            _reopen(conversation, console)
        except pagecast.Unavailable:
            raise
        except pagecast.PagecastError as error:
            console.out(f"error: {visible(str(error))}", highlight=False)


def _line(console: Console) -> str | None:
    """The next line; None at the input's end. Raises KeyboardInterrupt where that comes on an empty one."""
    while True:
        try:
            line = read_line(PROMPT)
        except EOFError:
            console.out()
            return None
        except LineDiscarded:
            console.out()
        except KeyboardInterrupt:
            console.out()
            raise
        except UnicodeError:
            console.out("error: TEXT: not UTF-8")
        else:
            return line


def _reply(
    conversation: Conversation, text: str, out: Output, console: Console, *, show_timing: bool
) -> None:
    with conversation.turn(text) as generation, cancel_on_interrupt(conversation.session, generation):
        stream(generation, out, console)
    result = generation.result
    if result.finish_reason is pagecast.FinishReason.CANCELLED:
        _tell(console, "cut short; what was shown stays in the history")
    elif result.finish_reason is pagecast.FinishReason.CONTEXT_FULL:
        _tell(console, "the context is full; /new begins a new session")
    if show_timing:
        _tell(console, timing_line(result))


def _command(text: str, conversation: Conversation, out: Output, console: Console) -> None:
    name, *arguments = text.split()
    if name == "/plan" and len(arguments) == 1 and arguments[0].lower() in PLANS:
        conversation.use_plan(PLANS[arguments[0].lower()])
        _tell(console, f"plan: {arguments[0].lower()}")
    elif name == "/info" and not arguments:
        out.write(details(conversation.session.get()))
    elif name == "/new" and not arguments:
        conversation.restart()
        _tell(console, f"session {conversation.session.session_id}")
    elif name == "/help" and not arguments:
        out.write(HELP)
    else:
        console.out(f"error: no command {visible(text)!r}; /help lists them", highlight=False)


def _reopen(conversation: Conversation, console: Console) -> None:
    """Open a new session, and wait for a worker that is not back yet."""
    deadline_s = time.monotonic() + REOPEN_TIMEOUT_S
    waited = False
    while True:
        try:
            conversation.restart()
        except (pagecast.NoWorker, pagecast.ModelNotFound):
            if time.monotonic() > deadline_s:
                raise
            if not waited:
                _tell(console, "waiting for a worker")
            waited = True
            time.sleep(0.5)
        else:
            return


def _tell(console: Console, text: str) -> None:
    console.print(visible(text), style="dim", markup=False, highlight=False, soft_wrap=True)
