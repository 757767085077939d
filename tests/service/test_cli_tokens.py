"""`pagecast tokenize` and `pagecast detokenize`."""

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from pagecast.v1 import model_pb2, session_pb2
from service.cli import main
from tests.client.fake_server import FakeServer


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def run(fake: FakeServer, *arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin, env={"PAGECAST_TARGET": fake.target})


def test_ids_with_what_each_spells(fake: FakeServer) -> None:
    result = run(fake, "tokenize", "a\n\x1ba")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == '97\t"a"\n10\t"\\n"\n27\t"\\u001b"\n97\t"a"\n'
    assert fake.last(model_pb2.TokenizeRequest).input == session_pb2.Input(text="a\n\x1ba")
    asked = [
        request.token_ids for request in fake.requests if isinstance(request, model_pb2.DetokenizeRequest)
    ]
    assert asked == [[97], [10], [27]]  # each id once


def test_ids_alone_and_json(fake: FakeServer) -> None:
    assert run(fake, "tokenize", "ab", "--ids").stdout == "97 98\n"
    assert json.loads(run(fake, "tokenize", "ab", "--json").stdout) == {
        "token_ids": [97, 98],
        "pieces": ["a", "b"],
    }
    assert json.loads(run(fake, "tokenize", "ab", "--json", "--ids").stdout) == {"token_ids": [97, 98]}


def test_a_control_token_is_told_as_one(fake: FakeServer) -> None:
    fake.control_ids = {98}
    assert run(fake, "tokenize", "abc").stdout == '97\t"a"\n98\t(control)\n99\t"c"\n'
    assert json.loads(run(fake, "tokenize", "abc", "--json").stdout)["pieces"] == ["a", None, "c"]


def test_chat_is_one_user_message_and_a_dash_is_stdin(fake: FakeServer) -> None:
    assert run(fake, "tokenize", "-", "--chat", "--ids", stdin="hi\n").stdout == "104 105 10\n"
    (message,) = fake.last(model_pb2.TokenizeRequest).input.messages.messages
    assert (message.role, message.content) == (session_pb2.ROLE_USER, "hi\n")


def test_there_and_back(fake: FakeServer) -> None:
    ids = run(fake, "tokenize", "héllo", "--ids").stdout
    assert run(fake, "detokenize", *ids.split()).stdout == "héllo\n"
    assert run(fake, "detokenize", "-", stdin=ids).stdout == "héllo\n"


def test_a_model_that_is_not_served(fake: FakeServer) -> None:
    line = "error: MODEL_NOT_FOUND: 'huge' is not served; served: tiny\n"
    for command in (["tokenize", "a"], ["detokenize", "1"]):
        result = run(fake, *command, "--model", "huge")
        assert (result.exit_code, result.stdout, result.stderr) == (1, "", line)


@pytest.mark.parametrize("value", ["x", "4294967296", "1.5", "²", "9" * 5000])
def test_ids_that_are_none(fake: FakeServer, value: str) -> None:
    result = run(fake, "detokenize", "1", value)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: IDS: ")


def test_no_ids_at_all(fake: FakeServer) -> None:
    result = run(fake, "detokenize", "-", stdin=" \n")
    assert (result.exit_code, result.stderr, fake.requests) == (
        2,
        "error: IDS: standard input holds none\n",
        [],
    )


def test_text_that_is_no_text(fake: FakeServer) -> None:
    result = run(fake, "tokenize", "-", stdin=b"abc\nd\xff")
    assert (result.exit_code, result.stderr) == (2, "error: TEXT: standard input is not UTF-8 at byte 5\n")
    assert run(fake, "tokenize", "a\udcff").exit_code == 2
