"""What a turn's input becomes: token ids for the log, and the conversation after it.

Every rule that needs the tokenizer or the template is checked here. Knows no sessions.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pagecast.v1 import session_pb2
from worker.checks import check_count, check_token_ids
from worker.commands import TurnBase
from worker.detokenize import Detokenizer
from worker.errors import Refused
from worker.model.chat import (
    ChatTemplate,
    Conversation,
    Message,
    MixedInput,
    TemplateError,
    TemplateNotIncremental,
)
from worker.model.tokenizer import TextError, Tokenizer
from worker.params import SamplingChoice

_ROLES = {
    session_pb2.ROLE_SYSTEM: "system",
    session_pb2.ROLE_USER: "user",
    session_pb2.ROLE_ASSISTANT: "assistant",
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """Token ids to append, and what the session's conversation is once they are in the log."""

    token_ids: tuple[int, ...]
    conversation: Conversation


class Intake:
    """Turns inputs of the public API into token ids.

    Args:
        tokenizer: The model's.
        template: The model's chat template, or None where it has none.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @property
    def vocab_size(self) -> int:
        """Ids from here on are no tokens."""
        return self._tokenizer.vocab_size

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a reply."""
        return self._tokenizer.eos_ids

    def tokenize(self, source: session_pb2.Input, *, max_tokens: int) -> tuple[int, ...]:
        """The ids that the log of a fresh session would hold after this input of a turn.

        Args:
            source: Any form of input.
            max_tokens: Length of the longest log.

        Refused: as `prepare`.
        """
        fresh = TurnBase(
            revision=0,
            num_tokens=0,
            max_context_tokens=max_tokens,
            conversation=Conversation(),
            defaults=SamplingChoice(),
        )
        ids = self.prepare(source, fresh).token_ids
        self._check_length(len(ids), max_tokens, "the input takes")
        return ids

    def detokenize(self, ids: Sequence[int], *, max_tokens: int) -> str:
        """The text of `ids` without special tokens, as the deltas of a turn would concatenate.

        Args:
            ids: As many as a log may hold.
            max_tokens: Length of the longest log.

        Refused: FIELD_OUT_OF_RANGE.
        """
        check_count(len(ids), max_tokens, "token_ids")
        check_token_ids(ids, "token_ids", vocab_size=self.vocab_size)
        detokenizer = Detokenizer(self._tokenizer.token_bytes)
        return "".join([*map(detokenizer.push, ids), detokenizer.finish()])

    def prepare(
        self, source: session_pb2.Input | None, base: TurnBase, *, opens_reply: bool = True
    ) -> Prepared:
        """Tokenise an input on top of a session; None opens the reply to appended messages, or continues.

        What can't fit however it is tokenised is refused before time is spent on it.

        Args:
            source: What a turn appends.
            base: What it is appended to.
            opens_reply: Whether a reply follows messages, so that the template opens it.

        Refused: INPUT_EMPTY, FIELD_OUT_OF_RANGE, FIELD_INVALID, PROMPT_TOO_LONG, MIXED_INPUT,
        TEMPLATE_ERROR, TEMPLATE_NOT_INCREMENTAL.
        """
        if source is None:
            return self._without_input(base.conversation)
        room = base.max_context_tokens - base.num_tokens
        match source.WhichOneof("content"):
            case "text":
                self._check_size(len(source.text.encode(errors="replace")), room)
                return self._text(source.text, base)
            case "token_ids":
                self._check_length(len(source.token_ids.ids), max(room, 0), "the input takes")
                return self._token_ids(tuple(source.token_ids.ids), base.conversation)
            case "messages":
                contents = (message.content for message in source.messages.messages)
                self._check_size(sum(len(content.encode(errors="replace")) for content in contents), room)
                return self._messages(source.messages, base.conversation, opens_reply=opens_reply)
        raise Refused("INPUT_EMPTY", "the input holds nothing", field="input")

    def _check_size(self, num_bytes: int, room: int) -> None:
        """Refuse a text that has too many bytes even if each token spelt as many as the longest one."""
        least = -(-num_bytes // self._tokenizer.max_token_bytes)
        self._check_length(least, max(room, 0), "the input takes at least")

    @staticmethod
    def _check_length(num_tokens: int, room: int, what: str) -> None:
        if num_tokens > room:
            raise Refused(
                "PROMPT_TOO_LONG",
                f"{what} {num_tokens} tokens; the context has room for {room}",
                field="input",
                metadata={"num_tokens": str(num_tokens), "room": str(room)},
            )

    def _text(self, text: str, base: TurnBase) -> Prepared:
        try:
            ids = self._tokenizer.encode_text(text)
        except TextError as error:
            raise Refused("FIELD_INVALID", str(error), field="input.text") from error
        if not ids:
            raise Refused("INPUT_EMPTY", "the text is empty", field="input.text")
        prefix = () if base.num_tokens else self._tokenizer.log_prefix
        return Prepared((*prefix, *ids), base.conversation.with_raw_input("raw text"))

    def _token_ids(self, ids: tuple[int, ...], conversation: Conversation) -> Prepared:
        if not ids:
            raise Refused("INPUT_EMPTY", "no token ids are given", field="input.token_ids.ids")
        check_token_ids(ids, "input.token_ids.ids", vocab_size=self.vocab_size)
        return Prepared(ids, conversation.with_raw_input("token ids"))

    def _without_input(self, conversation: Conversation) -> Prepared:
        if not conversation.num_appended:
            return Prepared((), conversation.continued())
        template = self._the_template("input")
        with _refusals("input"):
            turn = template.open_reply(conversation)
        return Prepared(turn.token_ids, turn.conversation)

    def _messages(
        self, source: session_pb2.Messages, conversation: Conversation, *, opens_reply: bool
    ) -> Prepared:
        field = "input.messages.messages"
        template = self._the_template(field)
        if not source.messages:
            raise Refused("INPUT_EMPTY", "no messages are given", field=field)
        for index, message in enumerate(source.messages):
            if message.role not in _ROLES:
                raise Refused(
                    "FIELD_INVALID", "a role is system, user or assistant", field=f"{field}[{index}].role"
                )
        messages = tuple(Message(_ROLES[message.role], message.content) for message in source.messages)
        with _refusals(field):
            turn = template.open_turn(conversation, messages, opens_reply=opens_reply)
        return Prepared(turn.token_ids, turn.conversation)

    def _the_template(self, field: str) -> ChatTemplate:
        if self._template is None:
            raise Refused("TEMPLATE_ERROR", "the model has no chat template", field=field)
        return self._template


@contextmanager
def _refusals(field: str) -> Iterator[None]:
    """Turn what a template raises into refusals of `field`."""
    try:
        yield
    except MixedInput as error:
        raise Refused("MIXED_INPUT", str(error), field=field) from error
    except TemplateNotIncremental as error:
        raise Refused(
            "TEMPLATE_NOT_INCREMENTAL", "the model's template rewrites earlier turns", field=field
        ) from error
    except TemplateError as error:
        raise Refused("TEMPLATE_ERROR", "the model's template refuses these messages", field=field) from error
    except TextError as error:
        raise Refused("FIELD_INVALID", str(error), field=field) from error
