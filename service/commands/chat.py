"""A conversation at a terminal: prompt, streamed reply, commands. Knows no flags and no exit codes."""

import time
from dataclasses import dataclass
from functools import partial

from rich.console import Console

import pagecast
from service.commands.conversation import SESSION_GONE, Conversation
from service.commands.interrupts import Interrupts
from service.commands.replies import PLANS, stream, tell_limit, timing_line
from service.commands.sessions import details, plan_name
from service.terminal import LineDiscarded, Output, read_line, tell, visible

PROMPT = "> "
# A worker that is restarted loads its model first.
REOPEN_TIMEOUT_S = 60.0
HELP = """\
/plan once|replan   how the decode step gets its plan, from the next step on; alone: how it does now
/info               the session's numbers
/new                a new session, with an empty history
/help               this
/quit               end (so do Ctrl-D, and Ctrl-C twice at an empty prompt)
Ctrl-C during a reply cuts it short; what was shown stays in the history. During a command it
leaves the command.
A message that begins with / is sent if it begins with //.
"""
_USAGES = {"/plan": "/plan once|replan"} | {
    name: name for name in ("/info", "/new", "/help", "/quit", "/exit")
}


def chat_terminal(conversation: Conversation, out: Output, console: Console, *, show_timing: bool) -> None:
    """Talk until the user ends it.

    A turn that fails is told and the conversation goes on; where its session is gone, in a new one.

    Args:
        conversation: Where to run the turns.
        out: Takes the replies.
        console: Takes everything else.
        show_timing: Whether to tell each reply's times.

    Raises:
        KeyboardInterrupt: Ctrl-C twice in a row at an empty prompt.
        OutputError: `out` cannot be written to.
        pagecast.Unavailable: The server is gone, or no worker came back in time.
    """
    tell(console, "/help lists the commands")
    with Interrupts() as interrupts:
        _talk(_Chat(conversation, out, console, interrupts, show_timing))


@dataclass(frozen=True, slots=True)
class _Chat:
    """What the parts of a conversation at a terminal share."""

    conversation: Conversation
    out: Output
    console: Console
    interrupts: Interrupts
    show_timing: bool


def _talk(chat: _Chat) -> None:
    while (line := _line(chat)) is not None:
        text = line.strip()
        if text in {"/quit", "/exit"}:
            return
        if not text:
            continue
        try:
            _take(text, line, chat)
        except KeyboardInterrupt:  # raised where something was waited for
            chat.console.out()
            tell(chat.console, "interrupted")


def _take(text: str, line: str, chat: _Chat) -> None:
    """Do what a line says. Raises KeyboardInterrupt where Ctrl-C came while something was waited for."""
    try:
        if text.startswith("/") and not text.startswith("//"):
            _command(text, chat)
        else:
            _reply(text.removeprefix("/") if text.startswith("//") else line, chat)
    except SESSION_GONE as error:
        tell(chat.console, f"the session is gone ({error}): a new one begins, with an empty history")
        try:
            _reopen(chat)
        except KeyboardInterrupt:
            chat.console.out()
            tell(chat.console, "interrupted; the next message looks for a worker again")
    except pagecast.Unavailable:
        raise
    except pagecast.PagecastError as error:
        _tell_error(chat.console, error)


def _line(chat: _Chat) -> str | None:
    """The next line; None at the input's end. Raises KeyboardInterrupt at the second Ctrl-C on none."""
    is_warned, console = False, chat.console
    chat.interrupts.forget()  # who pressed while a reply ended meant the reply
    while True:
        try:
            line = chat.interrupts.raised(partial(read_line, PROMPT))
        except EOFError:
            console.out()
            return None
        except LineDiscarded:
            console.out()
            is_warned = False
        except KeyboardInterrupt:
            console.out()
            if is_warned:
                raise
            is_warned = True
            tell(console, "Ctrl-C again, Ctrl-D or /quit ends")
        except UnicodeError:
            console.out("error: TEXT: not UTF-8")
            is_warned = False
        else:
            return line


def _reply(text: str, chat: _Chat) -> None:
    conversation, console = chat.conversation, chat.console
    try:
        chat.interrupts.raised(conversation.look)
    except KeyboardInterrupt:
        console.out()
        tell(console, "cut short before it was sent; nothing of this turn is in the history")
        return
    with (
        conversation.turn(text) as generation,
        chat.interrupts.cancelling(conversation.session, generation),
    ):
        try:
            stream(generation, chat.out, console)
        except (*SESSION_GONE, pagecast.Unavailable):
            raise
        except pagecast.PagecastError as error:
            _tell_failed(conversation, generation, error, console)
            return
    result = generation.result
    if result.finish_reason is pagecast.FinishReason.CANCELLED:
        tell(console, "cut short; what was shown stays in the history")
    elif result.finish_reason is pagecast.FinishReason.CONTEXT_FULL:
        tell(console, "the context is full; /new begins a new session")
    else:
        tell_limit(result, console)
    if chat.show_timing:
        tell(console, timing_line(result))


def _tell_failed(
    conversation: Conversation,
    generation: pagecast.Generation,
    error: pagecast.PagecastError,
    console: Console,
) -> None:
    """Say why a reply has no end of its own, and what of its turn is in the history."""
    is_cut = isinstance(error, pagecast.Cancelled)
    if not is_cut:  # who pressed Ctrl-C knows
        _tell_error(console, error)
    if isinstance(error, pagecast.PromptTooLong):
        if conversation.has_history:
            tell(console, "the context has no room for it; /new begins a new session")
    elif generation.generation_id is not None or is_cut or isinstance(error, pagecast.DeadlineExceeded):
        match conversation.stays(error):
            # Not "shown": the server may have been a few tokens ahead when it heard of the end.
            case True:
                tell(console, "cut short; what came by then stays in the history")
            case False:
                tell(console, "nothing of this turn is in the history")
            case None:
                tell(console, "it is not known what of this turn stays in the history")


def _tell_error(console: Console, error: pagecast.PagecastError) -> None:
    console.out(f"error: {visible(str(error))}", highlight=False)


def _command(text: str, chat: _Chat) -> None:
    conversation, console, raised = chat.conversation, chat.console, chat.interrupts.raised
    name, *arguments = text.split()
    if name == "/plan" and not arguments:
        tell(console, f"plan: {plan_name(raised(conversation.session.get))}")
    elif name == "/plan" and len(arguments) == 1 and arguments[0].lower() in PLANS:
        raised(partial(conversation.use_plan, PLANS[arguments[0].lower()]))
        tell(console, f"plan: {arguments[0].lower()}")
    elif name == "/info" and not arguments:
        chat.out.write(details(raised(conversation.session.get)))
    elif name == "/new" and not arguments:
        with conversation.waiting():
            raised(conversation.restart)
        tell(console, f"session {conversation.session.session_id}")
    elif name == "/help" and not arguments:
        chat.out.write(HELP)
    elif name in _USAGES:
        console.out(f"usage: {_USAGES[name]}", highlight=False)
    else:
        console.out(f"error: no command {visible(name)!r}; /help lists them", highlight=False)


def _reopen(chat: _Chat) -> None:
    """Open a new session, and wait for a worker that is not back yet.

    Raises:
        KeyboardInterrupt: Ctrl-C came.
        pagecast.Unavailable: None came back in time.
    """
    deadline_s = time.monotonic() + REOPEN_TIMEOUT_S
    waited = False
    while True:
        try:
            with chat.conversation.waiting():
                chat.interrupts.raised(chat.conversation.restart)
        except (pagecast.NoWorker, pagecast.ModelNotFound):
            if time.monotonic() > deadline_s:
                raise
            if not waited:
                tell(chat.console, "waiting for a worker")
            waited = True
            chat.interrupts.raised(partial(time.sleep, 0.5))
        else:
            return
