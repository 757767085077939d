"""What cannot be sent is refused by the option's name, before anything is sent."""

import inspect
import uuid
from collections.abc import Callable
from typing import Any

import pytest

import pagecast
from pagecast import _requests
from pagecast.v1 import generation_pb2, session_pb2
from tests.client.fake_server import FakeServer

SURROGATE = "a\ud800"


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
    return _requests.update_session("ses_0", **options)


def append(**options: Any) -> Any:
    return _requests.append_input("ses_0", "a", **options)


@pytest.mark.parametrize(
    ("build", "option", "bits"),
    [
        (generate, "max_tokens", 32),
        (generate, "seed", 64),
        (generate, "expected_revision", 64),
        (open_session, "max_context_tokens", 32),
        (open_session, "seed", 64),
        (update, "expected_revision", 64),
        (append, "expected_revision", 64),
        (generate, "min_tokens", 32),
        (generate, "top_k", 32),
        (open_session, "top_k", 32),
        (generate, "logprobs", 32),
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


REALS = [
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
]


@pytest.mark.parametrize("option", REALS)
@pytest.mark.parametrize("build", [generate, open_session])
def test_real_numbers(build: Callable[..., Any], option: str) -> None:
    for value in ("0.5", True, [0.5], 1j):
        with pytest.raises(TypeError, match=f"^{option}: expected a number, got "):
            build(**{option: value})
    with pytest.raises(ValueError, match=f"^{option}: "):
        build(**{option: 10**400})
    assert build(**{option: Index(1)}) == build(**{option: 1.0}) != build()


@pytest.mark.parametrize("build", [generate, open_session, update])
def test_priorities(build: Callable[..., Any]) -> None:
    for value in (-(2**31) - 1, 2**31, 10**5000):
        with pytest.raises(ValueError, match=r"^priority: .* is not from -2\*\*31 to 2\*\*31-1$"):
            build(priority=value)
    for value in (1.0, "1", True):
        with pytest.raises(TypeError, match=r"^priority: expected an int, got "):
            build(priority=value)
    assert build(priority=-(2**31)).priority == -(2**31)
    assert build(priority=0).HasField("priority")


@pytest.mark.parametrize("option", ["queue_timeout_s", "time_limit_s"])
def test_durations(option: str) -> None:
    field = option.removesuffix("_s")
    for value in (float("nan"), float("inf"), 1e12, -1e12):
        with pytest.raises(ValueError, match=f"^{option}: .* is not within 315576000000 seconds$"):
            generate(**{option: value})
    with pytest.raises(TypeError, match=f"^{option}: expected a number, got str$"):
        generate(**{option: "5"})
    for value, nanoseconds in ((1.5, 1_500_000_000), (0.1, 100_000_000), (1e-12, 1), (-0.5, -500_000_000)):
        assert getattr(generate(**{option: value}), field).ToNanoseconds() == nanoseconds
    assert generate(**{option: 0}).HasField(field)  # the server's to judge


@pytest.mark.parametrize("build", [generate, open_session])
def test_logit_bias(build: Callable[..., Any]) -> None:
    for value, error, message in [
        ([(1, 2.0)], TypeError, "logit_bias: expected a mapping of int to float, got list"),
        ({"1": 2.0}, TypeError, "a key of logit_bias: expected an int, got str"),
        ({-1: 2.0}, ValueError, "a key of logit_bias: -1 is not from 0"),
        ({1: "2"}, TypeError, r"logit_bias\[1\]: expected a number, got str"),
    ]:
        with pytest.raises(error, match=f"^{message}"):
            build(logit_bias=value)
    request = build(logit_bias={Index(7): 1})
    sampling = request.default_sampling if build is open_session else request.sampling
    assert sampling.logit_bias == {7: 1.0}


def test_stops() -> None:
    for value, error, message in [
        (b"x", TypeError, "stop: expected a sequence of str, got bytes"),
        ({"x"}, TypeError, "stop: expected a sequence of str, got set"),
        (["x", 5], TypeError, r"stop\[1\]: expected a str, got int"),
        (SURROGATE, ValueError, r"stop\[0\]: character 1 is a lone surrogate"),
    ]:
        with pytest.raises(error, match=f"^{message}"):
            generate(stop=value)
    for ids, message in [("12", "stop_token_ids: expected a sequence of int, got str"),
                         ([1, 2.0], r"stop_token_ids\[1\]: expected an int, got float")]:  # fmt: skip
        with pytest.raises(TypeError, match=f"^{message}"):
            generate(stop_token_ids=ids)
    assert generate(stop="xy").stopping.stop_sequences == ["xy"]
    request = generate(stop=("x", "y"), stop_token_ids=range(3))
    assert request.stopping.stop_sequences == ["x", "y"]
    assert request.stopping.stop_token_ids == [0, 1, 2]
    assert generate(stop=[], stop_token_ids=()) == generate()


def close(**options: Any) -> Any:
    return _requests.close_session("ses_0", **options)


def cancel(**options: Any) -> Any:
    return _requests.cancel_generation("ses_0", "gen_0", **options)


@pytest.mark.parametrize("build", [generate, open_session, update, append, close, cancel])
def test_request_ids(build: Callable[..., Any]) -> None:
    given = uuid.uuid4()
    assert build(request_id=given) == build(request_id=str(given))
    assert build(request_id=given).request_id == str(given)
    assert not build().HasField("request_id")
    assert build(request_id="").HasField("request_id")  # the server's to refuse
    for value in (given.bytes, given.int):
        with pytest.raises(TypeError, match=r"^request_id: expected a str or a UUID, got "):
            build(request_id=value)
    with pytest.raises(ValueError, match=r"^request_id: character 1"):
        build(request_id=SURROGATE)


def test_a_misspelt_option_is_told_by_the_public_method_with_the_nearest(fake: FakeServer) -> None:
    for name, nearest in [
        ("max_token", "max_tokens"), ("temprature", "temperature"), ("timeout", "timeout_s"),
        ("stops", "stop"), ("requestId", "request_id"),
    ]:  # fmt: skip
        message = rf"^generate\(\) got an unexpected option '{name}'; did you mean '{nearest}'\?$"
        with pagecast.Client(fake.target) as client, pytest.raises(TypeError, match=message):
            client.session("ses_0").generate("a", **{name: 1})  # type: ignore[misc]
    for build, method, name, nearest in [
        (open_session, "open_session", "label", "labels"),
        (open_session, "open_session", "top-k", "top_k"),
        (generate, "generate", "min_token", "min_tokens"),
    ]:
        with pytest.raises(TypeError, match=rf"^{method}\(\) .*'{name}'; did you mean '{nearest}'\?$"):
            build(**{name: 1})
    with pytest.raises(TypeError, match=r"^generate\(\) got an unexpected option 'zzz'$"):
        generate(zzz=1)
    assert fake.requests == []


def test_detokenize_takes_ids_only() -> None:
    assert _requests.detokenize("tiny", (1, 2)).token_ids == [1, 2]
    for value in ("12", b"12", 5):
        with pytest.raises(TypeError, match=r"^token_ids: expected a sequence of int"):
            _requests.detokenize("tiny", value)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("option", ["raw", "keep_partial", "token_timing", "ignore_eos"])
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


def keyword_names(function: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {given.name for given in parameters if given.kind is given.KEYWORD_ONLY}


def test_options_are_those_of_the_builders() -> None:
    for options, build in (
        (pagecast.SessionOptions, _requests.open_session),
        (pagecast.GenerateOptions, _requests.generate),
    ):
        names = keyword_names(build) | keyword_names(_requests.sampling_params)
        assert options.__annotations__.keys() == names
        told = (options.__doc__ or "") + (pagecast.SamplingOptions.__doc__ or "")
        assert all(f"{name}:" in told for name in names)
    assert pagecast.SamplingOptions.__annotations__.keys() == keyword_names(_requests.sampling_params)
    fields = session_pb2.SamplingParams.DESCRIPTOR.fields_by_name.keys()
    assert keyword_names(_requests.sampling_params) == set(fields)
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
