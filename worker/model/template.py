"""One Jinja chat template in a sandbox with bounds. Knows no tokens and no conversation.

A template comes with a model file, so it is not trusted: it reaches no attribute outside its data, and a
rendering ends by its length or its time. The time is looked at whenever the template calls something or
yields text, so one filter that runs long by itself is not interrupted.
"""

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import TemplateError as JinjaError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from worker.model.config import ModelFileError

MAX_RENDERED_CHARACTERS = 16 * 1024 * 1024
MAX_RENDER_S = 2.0

_DEADLINE = "pagecast_deadline_s"


class TemplateError(Exception):
    """The template refused the messages, broke the sandbox, or went over its bounds."""


class Template:
    """A compiled chat template.

    Args:
        source: Jinja source, with the whitespace rules and helpers that chat templates are written for:
            `raise_exception`, `strftime_now`, `tojson` without HTML escapes, `break` and `continue`.
        bos_token: Text of the BOS token.
        eos_token: Text of the EOS token.

    Raises:
        ModelFileError: `source` is no valid Jinja.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # constant expressions run at compile time and raise whatever they raise
            raise ModelFileError(f"tokenizer.chat_template is not valid ({error})") from error

    @staticmethod
    def now() -> datetime:
        """The local time that templates may print."""
        return datetime.now(UTC).astimezone()

    def render(self, messages: list[dict[str, str]], now: datetime, *, opens_reply: bool = True) -> str:
        """Renders `messages` and the opening of a reply.

        Args:
            messages: Dicts of role and content.
            now: What `strftime_now` prints.
            opens_reply: Whether the opening of a reply follows, `add_generation_prompt` to the template.

        Raises:
            TemplateError: See the class.
        """
        pieces: list[str] = []
        num_characters = 0
        deadline_s = time.monotonic() + MAX_RENDER_S
        variables: dict[str, object] = {
            **self._tokens,
            "messages": messages,
            "add_generation_prompt": opens_reply,
            "tools": None,
            "documents": None,
            "strftime_now": now.strftime,
            _DEADLINE: deadline_s,
        }
        try:
            for piece in self._template.generate(variables):
                num_characters += len(piece)
                if num_characters > MAX_RENDERED_CHARACTERS:
                    raise TemplateError(
                        f"the chat template rendered over {MAX_RENDERED_CHARACTERS} characters"
                    )
                _check_deadline(deadline_s)
                pieces.append(piece)
        except TemplateError:
            raise
        except JinjaError as error:
            raise TemplateError(f"the chat template failed: {error.message}") from error
        except Exception as error:  # a template raises whatever its expressions raise
            raise TemplateError(f"the chat template failed with {type(error).__name__}") from error
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox that also looks at the clock at calls, and at the size of products."""

    intercepted_binops = frozenset({"*", "**"})

    def call(self, context: Context, callee: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        _check_deadline(context.parent[_DEADLINE])
        return super().call(context, callee, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses powers, and repeats longer than a rendering may be."""
        if operator == "**":
            raise TemplateError("the chat template takes a power")
        for sequence, times in ((left, right), (right, left)):
            if (
                isinstance(times, int)
                and isinstance(sequence, str | list | tuple)
                and len(sequence) * times > MAX_RENDERED_CHARACTERS
            ):
                raise TemplateError(f"the chat template rendered over {MAX_RENDERED_CHARACTERS} characters")
        return super().call_binop(context, operator, left, right)


def _check_deadline(deadline_s: float) -> None:
    if time.monotonic() > deadline_s:
        raise TemplateError(f"the chat template ran over {MAX_RENDER_S} s")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(f"the chat template refuses the messages: {message}")


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  templates pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002  as above
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
