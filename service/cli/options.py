"""Options that commands share, and what they are made of. Knows no command."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import click

import pagecast
from service.cli.running import variable
from service.cli.text import bad_character
from service.commands.replies import PLANS, Choices
from service.config import DEFAULT_ADDRESS
from service.validate import limits

_DAY_S = 86_400

Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def option(flag: str, *name: str, **attributes: Any) -> Decorator:
    """An option of a client command that PAGECAST_<NAME> can set too."""
    return click.option(flag, *name, envvar=variable(flag), show_envvar=True, **attributes)


def options_of(command: click.Command) -> Iterator[click.Option]:
    """Every option of a command and of its subcommands."""
    yield from (parameter for parameter in command.params if isinstance(parameter, click.Option))
    for subcommand in command.commands.values() if isinstance(command, click.Group) else ():
        yield from options_of(subcommand)


class _Plan(click.Choice[str]):
    """A plan in any case, also by the proto's name of it, which its own words leave out."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        named = isinstance(value, str) and value.lower() == "plan_once"
        return super().convert("once" if named else value, param, ctx)


PLAN_CHOICE = _Plan(list(PLANS), case_sensitive=False)


class _Bias(click.ParamType[tuple[int, float]]):
    """ID=VALUE as a token id and what is added to its logit."""

    name = "id=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        token_id, separator, bias = str(value).partition("=")
        try:
            taken = _token_id(token_id), _finite(bias)
        except ValueError:
            what = "is not a token id, = and a number" if separator else "has no ="
            self.fail(f"{value!r} {what}.", param, ctx)
        if taken[1] not in limits.LOGIT_BIAS:
            self.fail(f"{taken[1]:g} is not {limits.LOGIT_BIAS}.", param, ctx)
        return taken


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 32):
        raise ValueError(text)
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


class _Label(click.ParamType[tuple[str, str]]):
    """KEY=VALUE; the value may be empty and may hold `=`."""

    name = "key=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        key, separator, text = str(value).partition("=")
        if not (key and separator):
            self.fail(f"{value!r} has no {'key before =' if separator else '='}.", param, ctx)
        for part in (key, text):
            if bad_character(part) is not None:
                self.fail("is not UTF-8.", param, ctx)
            if len(part.encode()) > limits.MAX_LABEL_BYTES:
                self.fail(f"a key or value is over {limits.MAX_LABEL_BYTES} bytes.", param, ctx)
        return key, text


def _labels(
    context: click.Context, parameter: click.Parameter, value: tuple[tuple[str, str], ...]
) -> dict[str, str]:
    _at_most(limits.MAX_LABELS)(context, parameter, value)
    keys = [key for key, _ in value]
    for key in keys:
        if keys.count(key) > 1:
            raise click.BadParameter(f"{key!r} is given twice.", context, parameter)
    return dict(value)


def number(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Refuses nan, which no range of click's does."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is not a number.", context, parameter)
    return value


def is_text(
    context: click.Context, parameter: click.Parameter, value: str | tuple[str, ...] | None
) -> str | tuple[str, ...] | None:
    """Refuses bytes that are not text."""
    for item in value if isinstance(value, tuple) else (value,):
        if item is not None and bad_character(item) is not None:
            raise click.BadParameter("is not UTF-8.", context, parameter)
    return value


def has_text(
    context: click.Context, parameter: click.Parameter, value: str | tuple[str, ...] | None
) -> str | tuple[str, ...] | None:
    """Refuses what is empty, and bytes that are not text."""
    if "" in (value if isinstance(value, tuple) else (value,)):
        raise click.BadParameter("is empty.", context, parameter)
    return is_text(context, parameter, value)


def _stops(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    has_text(context, parameter, value)
    if any(len(stop.encode()) > limits.MAX_STOP_SEQUENCE_BYTES for stop in value):
        raise click.BadParameter(f"is over {limits.MAX_STOP_SEQUENCE_BYTES} bytes.", context, parameter)
    return _at_most(limits.MAX_STOP_SEQUENCES)(context, parameter, value)


def _at_most(count: int) -> Callable[[click.Context, click.Parameter, tuple[Any, ...]], tuple[Any, ...]]:
    """A callback that refuses more values of a repeatable option."""

    def check(context: click.Context, parameter: click.Parameter, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(value) > count:
            raise click.BadParameter(f"is given {len(value)} times; at most {count}.", context, parameter)
        return value

    return check


def _biases(
    context: click.Context, parameter: click.Parameter, value: tuple[tuple[int, float], ...]
) -> tuple[tuple[int, float], ...]:
    _at_most(limits.MAX_LOGIT_BIASES)(context, parameter, value)
    ids = [token_id for token_id, _ in value]
    for token_id in ids:
        if ids.count(token_id) > 1:
            raise click.BadParameter(f"token {token_id} is given twice.", context, parameter)
    return value


def _real(flag: str, text: str) -> Decorator:
    taken = limits.SAMPLING[flag.removeprefix("--").replace("-", "_")]
    span = click.FloatRange(taken.low, taken.high, min_open=taken.is_open)
    return option(flag, type=span, callback=number, metavar="NUMBER", help=text)


def _seconds(flag: str, text: str) -> Decorator:
    span = click.FloatRange(0, _DAY_S, min_open=True)
    return option(flag, f"{flag[2:].replace('-', '_')}_s", type=span, callback=number, metavar="SECONDS",
                  help=text)  # fmt: skip


def _whole(flag: str, low: int, high: int, text: str) -> Decorator:
    return option(flag, type=click.IntRange(low, high), metavar="N", help=text)


TARGET = option("--target", metavar="HOST:PORT", help=f"The server; {DEFAULT_ADDRESS} unless set.")
LABEL = click.option("--label", "labels", type=_Label(), multiple=True, callback=_labels, metavar="KEY=VALUE",
                     help="Add this label, or replace the one of its key; repeatable.")  # fmt: skip
MODEL = option(
    "--model",
    metavar="NAME",
    callback=has_text,
    help="A served model; may be left out where there is only one. A path to a .gguf file stands for the "
    "name that `serve` gives it: the file's, without .gguf.",
)
JSON = option("--json", "as_json", is_flag=True, help="Print JSON, one line for each thing.")

# Ranges are the server's own; it has the last word.
_SAMPLING = (
    _real("--temperature", "0 is greedy (the default)."),
    _whole("--top-k", 1, 2**32 - 1, "Draw from the N likeliest tokens."),
    _real("--top-p", "Draw from the likeliest tokens of this probability together."),
    _real("--min-p", "Draw from tokens at least so likely beside the likeliest."),
    _whole("--seed", 0, 2**64 - 1, "Same seed, same tokens."),
    _real("--repetition-penalty", "Over what the session holds; 1 is neutral."),
    _real("--presence-penalty", "Over what the reply holds; 0 is neutral."),
    _real("--frequency-penalty", "Over how often the reply holds it; 0 is neutral."),
    click.option("--logit-bias", type=_Bias(), multiple=True, callback=_biases, metavar="ID=VALUE",
                 help="Add VALUE, from -100 to 100, to a token's logit; repeatable."),
)  # fmt: skip
_STOPPING = (
    _whole("--max-tokens", 1, 2**32 - 1, "End after this many tokens."),
    _whole("--min-tokens", 0, 2**32 - 1, "Do not end before this many tokens."),
    click.option("--stop", multiple=True, callback=_stops, metavar="TEXT",
                 help="End before this text; repeatable."),
    click.option("--stop-token-id", "stop_token_ids", type=click.IntRange(0, 2**32 - 1), multiple=True,
                 callback=_at_most(limits.MAX_STOP_TOKEN_IDS), metavar="ID",
                 help="End with this token; repeatable."),
    option("--ignore-eos", is_flag=True, help="Go on after the end-of-text token."),
    _seconds("--time-limit", "End the reply, as it is, after this long."),
    _seconds("--queue-timeout", "Give up if the reply does not begin within this."),
    _whole("--priority", -(2**31), 2**31 - 1, "Higher runs first; 0 unless set."),
)  # fmt: skip
_REPLY = (
    TARGET,
    MODEL,
    option("--plan", type=PLAN_CHOICE, metavar="[once|replan]", help="How the decode step gets its plan."),
    *_SAMPLING,
    *_STOPPING,
    _seconds("--timeout", "Deadline of a reply."),
)


def reply_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a reply; they reach it as `target` and one value, `choices`."""

    @functools.wraps(command)
    def with_choices(*, model: str | None, plan: str | None, timeout_s: float | None, **given: Any) -> None:
        if (given["min_tokens"] or 0) > (given["max_tokens"] or math.inf):
            raise click.BadParameter(
                f"{given['min_tokens']} is over --max-tokens, {given['max_tokens']}.",
                click.get_current_context(),
                param_hint="'--min-tokens'",
            )
        options = pagecast.GenerateOptions()
        for name in pagecast.GenerateOptions.__annotations__.keys() & given.keys() - _OWN:
            value = given.pop(name)
            if not (value is None or value is False or value == ()):
                options[name] = dict(value) if name == "logit_bias" else value  # type: ignore[literal-required]
        choices = Choices(model, PLANS[plan] if plan else None, timeout_s, options)
        command(choices=choices, **given)

    made: Callable[..., None] = with_choices
    for add in reversed(_REPLY):
        made = add(made)
    return made


# Options of single commands, which they may name as the client does.
_OWN = {"raw", "logprobs"}
