import re
import time
from datetime import UTC, datetime

import pytest

from worker.model.config import ModelFileError
from worker.model.template import MAX_RENDER_S, Template, TemplateError

NOW = datetime(2024, 7, 26, tzinfo=UTC)
HELLO = [{"role": "user", "content": "hello <&>"}]


def render(source: str, messages: list[dict[str, str]] = HELLO) -> str:
    return Template(source, bos_token="<s>", eos_token="</s>").render(messages, NOW)


def test_helpers_that_chat_templates_expect() -> None:
    source = (
        "{{ bos_token }}{{ eos_token }}{{ strftime_now('%d %b %Y') }}{{ add_generation_prompt }}"
        "{{ tools is none }}{{ messages[0] | tojson }}{% for x in 'abc' %}{% break %}{% endfor %}"
    )
    assert render(source) == '<s></s>26 Jul 2024TrueTrue{"role": "user", "content": "hello <&>"}'


def test_blocks_leave_no_blanks() -> None:
    assert render("  {% if true %}\na\n  {% endif %}\nb") == "a\nb"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{{ messages[0].nothing.more }}", "failed"),
        ("{{ ''.__class__.__mro__ }}", "failed"),
        ("{{ messages.append(1) }}", "failed"),
        ("{{ 1 // 0 }}{{ messages }}", "ZeroDivisionError"),
        ("{{ messages[0].content * 999999999 }}", "characters"),
        ("{{ 'ab' * 99999999 }}", "characters"),
        ("{{ 9 ** 999999999 }}", "power"),
        ("{% for x in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_says_so(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=re.escape(message)):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set s = 'x' * 9999 %}{% for a in s %}{% for b in s %}{{ b[2:] }}{% endfor %}{% endfor %}",
    ],
)
def test_a_slow_template_is_ended(source: str) -> None:
    start_s = time.monotonic()
    with pytest.raises(TemplateError, match="ran over"):
        render(source)
    assert time.monotonic() - start_s < MAX_RENDER_S + 1


@pytest.mark.parametrize("source", ["{% if %}", "{{ a", "{% nothing %}"])
def test_broken_source_is_the_files_fault(source: str) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer.chat_template is not valid"):
        Template(source, bos_token="", eos_token="")
