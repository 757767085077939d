"""Chat turns: which tokens a turn's messages append to a log. Knows no sessions and no torch.

A log is never rewritten, so a template must grow: what it renders for a history, up to the last reply, must
be what it rendered before that reply. `ChatTemplate.open_turn` renders the history with a stand-in for every
generated reply, checks that, and returns what follows the last stand-in and the messages appended since.
`open_reply` does so where no message is new.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain

from worker.model.template import Template, TemplateError
from worker.model.tokenizer import Tokenizer

__all__ = [
    "ROLES",
    "ChatTemplate",
    "Conversation",
    "GeneratedReply",
    "Message",
    "MixedInput",
    "TemplateError",
    "TemplateNotIncremental",
    "Turn",
]

ROLES = ("system", "user", "assistant")


class TemplateNotIncremental(Exception):
    """The model's template rewrites earlier turns, so no suffix of tokens opens this one."""


class MixedInput(Exception):
    """The log holds raw text or ids, so no list of messages describes it."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a turn's input.

    Raises:
        ValueError: The role is none of `ROLES`.
    """

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role {self.role!r} is none of {', '.join(ROLES)}")


@dataclass(frozen=True, slots=True)
class GeneratedReply:
    """Stands for a reply whose tokens are in the log; `closed_by_eos`: whether its last one is an EOS."""

    closed_by_eos: bool


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a log means as a chat. Empty for a new session.

    Attributes:
        entries: Input messages and generated replies, oldest first. Behind the last reply stand messages
            that were appended without opening a reply.
        raw_by: What the log holds, first of all, that no message describes; empty while it is a chat.
    """

    entries: tuple[Message | GeneratedReply, ...] = ()
    raw_by: str = ""

    @property
    def is_raw(self) -> bool:
        """Whether the log holds what no message describes, so that no list of messages does."""
        return bool(self.raw_by)

    @property
    def last_reply_index(self) -> int | None:
        """Where in `entries` the last reply is."""
        indices = range(len(self.entries) - 1, -1, -1)
        return next((index for index in indices if isinstance(self.entries[index], GeneratedReply)), None)

    @property
    def num_appended(self) -> int:
        """Messages behind the last reply."""
        last = self.last_reply_index
        return len(self.entries) - (0 if last is None else last + 1)

    def after_reply(self, *, closed_by_eos: bool) -> "Conversation":
        """After a generation, also one that continued a reply and one that yielded no token.

        Args:
            closed_by_eos: Whether the log's last token is one of the tokenizer's `eos_ids`.
        """
        if self.is_raw:
            return self
        before = self.entries[:-1] if self._last_reply() else self.entries
        return replace(self, entries=(*before, GeneratedReply(closed_by_eos)))

    def with_raw_input(self, what: str) -> "Conversation":
        """After `what`, text or ids, was appended: no chat any more."""
        return self if self.is_raw else Conversation(raw_by=what)

    def continued(self) -> "Conversation":
        """Before a generation that appends nothing: a cut reply goes on, past an EOS it is raw.

        Where messages were appended `ChatTemplate.open_reply` is what comes before it.
        """
        reply = self._last_reply()
        is_cut = reply is not None and not reply.closed_by_eos
        return self if is_cut else self.with_raw_input("a reply that was continued past its end")

    def _last_reply(self) -> GeneratedReply | None:
        last = self.entries[-1] if self.entries else None
        return last if isinstance(last, GeneratedReply) else None


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens that a turn's input appends, and the conversation with that input."""

    token_ids: tuple[int, ...]
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class _Rendering:
    """What renderings that are compared share: characters that no content has, and the time."""

    marker: str
    stand_in_character: str
    now: datetime

    def stand_in(self, index: int) -> str:
        """What is rendered in place of the reply at `index`."""
        return f"{self.stand_in_character}{index}{self.stand_in_character}"


class ChatTemplate:
    """A model's chat template over its tokenizer.

    Attributes:
        is_incremental: Whether replies survive in later renderings, as probed with a plain reply and one
            that has a thinking part. If not, a session gets one turn of messages.

    Raises:
        ModelFileError: The template is no valid Jinja.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = Template(source, bos_token=tokenizer.bos_text, eos_token=tokenizer.eos_text)
        self._reserved = frozenset(chain(source, *tokenizer.control_texts()))
        self.is_incremental = self._keeps_replies()

    def open_turn(
        self, conversation: Conversation, new_messages: tuple[Message, ...], *, opens_reply: bool = True
    ) -> Turn:
        """The tokens by which `new_messages`, and the opening of a reply, extend the log.

        The first turn yields the whole rendering, with one BOS where the tokenizer wants one. A later turn
        yields the rendering's suffix behind the last reply, without the EOS if that reply brought its own;
        a cut reply is closed by it. Messages that were appended behind the last reply are in the log: what
        follows their tokens is yielded, so that the log is as if all had come in one turn.

        Args:
            conversation: State of the log.
            new_messages: At least one.
            opens_reply: Whether a reply follows. If not the messages are appended and the turn is over.

        Raises:
            MixedInput: The log holds raw input.
            TemplateNotIncremental: The template rewrites the history.
            TemplateError: The template refuses the messages, breaks the sandbox or its bounds.
            TextError: A content can't become tokens.
            ValueError: No new message.
        """
        if conversation.is_raw:
            raise MixedInput(f"messages can't follow {conversation.raw_by} in the log")
        if not new_messages:
            raise ValueError("a turn needs at least one message")
        return self._extend(conversation, new_messages, opens_reply=opens_reply)

    def open_reply(self, conversation: Conversation) -> Turn:
        """The tokens that open the reply to appended messages: the log is as if they had come with the turn.

        Raises:
            TemplateNotIncremental, TemplateError, TextError: As `open_turn`.
            ValueError: No messages were appended.
        """
        if not conversation.num_appended:
            raise ValueError("no messages wait for a reply")
        return self._extend(conversation, (), opens_reply=True)

    def _extend(
        self, conversation: Conversation, new_messages: tuple[Message, ...], *, opens_reply: bool
    ) -> Turn:
        entries = (*conversation.entries, *new_messages)
        rendering = _Rendering(*self._free_characters(entries), Template.now())
        ids = self._behind_last_reply(entries, conversation.last_reply_index, rendering, opens_reply)
        if conversation.num_appended:
            in_log = self._behind_last_reply(
                conversation.entries, conversation.last_reply_index, rendering, opens_reply=False
            )
            if ids[: len(in_log)] != in_log:
                raise TemplateNotIncremental("the model's chat template changes appended messages")
            ids = ids[len(in_log) :]
        return Turn(ids, Conversation(entries))

    def _behind_last_reply(
        self,
        entries: tuple[Message | GeneratedReply, ...],
        last_reply: int | None,
        rendering: "_Rendering",
        opens_reply: bool,  # noqa: FBT001
    ) -> tuple[int, ...]:
        """Ids of `entries` behind the last reply's own: of the whole rendering where there is none."""
        rendered = self._render(entries, rendering, opens_reply=opens_reply)
        if last_reply is None:
            bos_text = self._tokenizer.bos_text
            has_bos = bool(bos_text) and rendered.startswith(bos_text)
            ids = self._tokenizer.encode_template(rendered, rendering.marker)
            return (*(() if has_bos else self._tokenizer.log_prefix), *ids)

        if not self.is_incremental:
            raise TemplateNotIncremental("the model's chat template changes earlier replies")
        earlier = self._render(entries[:last_reply], rendering, opens_reply=True)
        stand_in = rendering.stand_in(last_reply)
        before, found, suffix = rendered.partition(stand_in)
        if not found or before != earlier or stand_in in suffix:
            raise TemplateNotIncremental("the model's chat template changes earlier turns")
        ids = self._tokenizer.encode_template(suffix, rendering.marker)
        reply = entries[last_reply]
        if isinstance(reply, GeneratedReply) and reply.closed_by_eos:
            if not ids or ids[0] not in self._tokenizer.eos_ids:
                raise TemplateNotIncremental("the model's chat template does not close a reply with an EOS")
            ids = ids[1:]
        return tuple(ids)

    def _render(
        self, entries: tuple[Message | GeneratedReply, ...], rendering: "_Rendering", *, opens_reply: bool
    ) -> str:
        messages = [
            {"role": "assistant", "content": rendering.stand_in(index)}
            if isinstance(entry, GeneratedReply)
            else {"role": entry.role, "content": self._tokenizer.protect(entry.content, rendering.marker)}
            for index, entry in enumerate(entries)
        ]
        return self._template.render(messages, rendering.now, opens_reply=opens_reply)

    def _free_characters(self, entries: tuple[Message | GeneratedReply, ...]) -> tuple[str, str]:
        """Two private-use characters that neither the contents nor the template use."""
        used = self._reserved.union(*(entry.content for entry in entries if isinstance(entry, Message)))
        free = (char for char in _private_use() if char not in used)
        marker, stand_in = next(free, None), next(free, None)
        if marker is None or stand_in is None:
            raise TemplateError("the messages use every private-use character")
        return marker, stand_in

    def _keeps_replies(self) -> bool:
        now = Template.now()
        question = {"role": "user", "content": "a"}
        try:
            opened = self._template.render([question], now)
            # Blanks around a reply may be trimmed: no words are lost, and the log keeps them as drawn.
            for reply in ("b", "<think>x</think>y"):
                history = [
                    question,
                    {"role": "assistant", "content": reply},
                    {"role": "user", "content": "c"},
                ]
                if not self._template.render(history, now).startswith(opened + reply):
                    return False
        except TemplateError:
            return False
        return True


def _private_use() -> Iterator[str]:
    return map(chr, chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)))
