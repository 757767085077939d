"""What cannot be sent is refused by the option's name, before anything is sent."""

import array
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import pagecast
from pagecast import _requests
from pagecast.v1 import generation_pb2
from tests.client.fake_server import FakeServer

SURROGATE = "a\ud800"
ACCEPTED = "a str, a sequence of int, a sequence of Message, or None"


class Index:
    """An integer of another library, such as numpy's."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def generate(**options: Any) -> Any:
    return _requests.generate("ses_0", "a", **options)


def open_session(**options: Any) -> Any:
    return _requests.open_session("tiny", **options)


def update(**options: Any) -> Any:
    given = {"plan": None, "labels": None, "expected_revision": None} | options
    return _requests.update_session("ses_0", **given)


@pytest.mark.parametrize(
    ("build", "option", "bits"),
    [
        (generate, "max_tokens", 32),
        (generate, "seed", 64),
        (generate, "expected_revision", 64),
        (open_session, "max_context_tokens", 32),
        (open_session, "seed", 64),
        (update, "expected_revision", 64),
    ],
)
def test_whole_numbers(build: Callable[..., Any], option: str, bits: int) -> None:
    for value in (-1, 2**bits, 10**5000, Index(-1)):
        with pytest.raises(ValueError, match=rf"^{option}: .* is not from 0 to 2\*\*{bits}-1$"):
            build(**{option: value})
    for value in (2.5, "3", True, [1], 1j):
        with pytest.raises(TypeError, match=f"^{option}: expected an int, got {type(value).__name__}$"):
            build(**{option: value})
    assert build(**{option: Index(2**bits - 1)}) == build(**{option: 2**bits - 1}) != build()


@pytest.mark.parametrize("build", [generate, open_session])
def test_temperature(build: Callable[..., Any]) -> None:
    for value in ("0.5", True, [0.5], 1j):
        with pytest.raises(TypeError, match=r"^temperature: expected a number, got "):
            build(temperature=value)
    with pytest.raises(ValueError, match=r"^temperature: "):
        build(temperature=10**400)
    assert build(temperature=Index(1)) == build(temperature=1.0) != build()


@pytest.mark.parametrize("build", [open_session, update])
def test_labels(build: Callable[..., Any]) -> None:
    for value, error, message in [
        (["a"], TypeError, "labels: expected a mapping of str to str, got list"),
        ({1: "a"}, TypeError, "a key of labels: expected a str, got int"),
        ({"k": 1}, TypeError, r"labels\['k'\]: expected a str, got int"),
        ({SURROGATE: "a"}, ValueError, "a key of labels: character 1 is a lone surrogate"),
        ({"k": SURROGATE}, ValueError, r"labels\['k'\]: character 1 is a lone surrogate"),
    ]:
        with pytest.raises(error, match=f"^{message}"):
            build(labels=value)
    assert build(labels={"k": "v"}).labels == {"k": "v"}


@pytest.mark.parametrize("option", ["raw", "keep_partial", "token_timing"])
def test_flags(option: str) -> None:
    with pytest.raises(TypeError, match=f"^{option}: expected a bool, got str$"):
        generate(**{option: "false"})


@pytest.mark.parametrize("build", [open_session, update])
def test_plans(build: Callable[..., Any]) -> None:
    for value in ("once", 7):
        with pytest.raises(ValueError, match=f"^plan: expected a PagedDecodePlan, got {value!r}$"):
            build(plan=value)


def test_names_and_ids() -> None:
    for error, value in ((TypeError, None), (TypeError, b"ses_0"), (ValueError, SURROGATE)):
        with pytest.raises(error, match=r"^model: "):
            _requests.open_session(value)  # type: ignore[arg-type]
        with pytest.raises(error, match=r"^generation_id: "):
            _requests.cancel_generation("ses_0", value)  # type: ignore[arg-type]
        for build in (_requests.get_session, _requests.close_session):
            with pytest.raises(error, match=r"^session_id: "):
                build(value)  # type: ignore[arg-type]
        with pytest.raises(error, match=r"^session_id: "):
            _requests.generate(value, "a")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [b"ab", bytearray(b"ab"), memoryview(b"ab"), 5, 5.0, object(), {1, 2}, {1: 2}, iter([1]),
     pagecast.Message("user", "a")],
)  # fmt: skip
def test_inputs_of_the_wrong_kind(content: Any) -> None:
    with pytest.raises(TypeError, match=f"^input: expected {ACCEPTED}, got {type(content).__name__}$"):
        _requests.generate("ses_0", content)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ([1, 2.0], TypeError, f"input: expected {ACCEPTED}; item 1 is float"),
        ([True], TypeError, f"input: expected {ACCEPTED}; item 0 is bool"),
        (["a"], TypeError, f"input: expected {ACCEPTED}; item 0 is str"),
        ([1, pagecast.Message("user", "a")], TypeError, f"input: expected {ACCEPTED}; item 1 is Message"),
        ([pagecast.Message("user", "a"), 1], TypeError, rf"input: expected {ACCEPTED}; input\[1\] is int"),
        ([1, -1], ValueError, r"input\[1\]: -1 is not from 0 to 2\*\*32-1"),
        ([2**32], ValueError, r"input\[0\]: 4294967296 is not from 0"),
        (SURROGATE, ValueError, r"input\[0\].content: character 1 is a lone surrogate"),
        ([pagecast.Message("tool", "a")], ValueError, r"input\[0\].role: 'tool' is none of system, user"),  # type: ignore[arg-type]
        ([pagecast.Message(["user"], "a")], TypeError, r"input\[0\].role: expected a str"),  # type: ignore[arg-type]
        ([pagecast.Message("user", 5)], TypeError, r"input\[0\].content: expected a str, got int"),  # type: ignore[arg-type]
    ],
)
def test_items_of_the_wrong_kind(content: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        _requests.generate("ses_0", content)


def test_a_raw_text_of_no_characters_that_utf8_has() -> None:
    with pytest.raises(ValueError, match=r"^input: character 1 is a lone surrogate"):
        _requests.generate("ses_0", SURROGATE, raw=True)


@pytest.mark.parametrize("ids", [range(1, 4), (1, 2, 3), array.array("I", [1, 2, 3]), [1, Index(2), 3]])
def test_any_sequence_of_whole_numbers_is_ids(ids: Any) -> None:
    assert _requests.generate("ses_0", ids).input.token_ids.ids == [1, 2, 3]


def test_options_are_those_of_the_builders() -> None:
    for options, build in (
        (pagecast.SessionOptions, _requests.open_session),
        (pagecast.GenerateOptions, _requests.generate),
    ):
        parameters = inspect.signature(build).parameters.values()
        names = {given.name for given in parameters if given.kind is given.KEYWORD_ONLY}
        assert options.__annotations__.keys() == names
        assert all(f"{name}:" in (options.__doc__ or "") for name in names)
    for client in (pagecast.Client, pagecast.AsyncClient):
        assert "pagecast.SessionOptions" in (client.open_session.__doc__ or "")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e12, "5", True])
async def test_deadlines(fake: FakeServer, value: Any) -> None:
    error = TypeError if isinstance(value, str | bool) else ValueError
    for kind in (pagecast.Client, pagecast.AsyncClient):
        with pytest.raises(error, match=r"^timeout_s: "):
            kind(fake.target, timeout_s=value)
    with pagecast.Client(fake.target) as client:
        with pytest.raises(error, match=r"^timeout_s: "):
            client.models(timeout_s=value)
        with pytest.raises(error, match=r"^timeout_s: "):
            client.session("ses_0").generate("a", timeout_s=value)
    async with pagecast.AsyncClient(fake.target) as aclient:
        with pytest.raises(error, match=r"^timeout_s: "):
            await aclient.models(timeout_s=value)
        with pytest.raises(error, match=r"^timeout_s: "):
            aclient.session("ses_0").generate("a", timeout_s=value)
    assert fake.requests == []


async def test_nothing_is_sent_where_an_option_cannot_be(fake: FakeServer) -> None:
    with pagecast.Client(fake.target) as client:
        session = client.open_session("tiny")
        with pytest.raises(ValueError, match="max_tokens"):
            session.generate("a", max_tokens=-1)
        assert not any(isinstance(request, generation_pb2.GenerateRequest) for request in fake.requests)
        assert session.generate("a").wait().text == "a"
