"""`pagecast sessions` and `pagecast models` in pipes; what a terminal shows is in `test_terminal`."""

import json
from collections.abc import Iterator

import grpc
import pytest
from click.testing import CliRunner, Result
from google.protobuf.timestamp_pb2 import Timestamp

import pagecast
from pagecast.v1 import session_pb2
from service.cli import main
from service.commands.sessions import _idle
from tests.client.fake_server import FakeServer, Refusal


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def run(fake: FakeServer, *arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, env={"PAGECAST_TARGET": fake.target})


def open_sessions(fake: FakeServer, *labels: dict[str, str]) -> list[str]:
    with pagecast.Client(fake.target) as client:
        return [client.open_session("tiny", labels=given).session_id for given in labels]


def test_list_is_plain_columns_newest_first(fake: FakeServer) -> None:
    open_sessions(fake, {}, {"a": "b", "c": "d"})
    fake.state["ses_0"].num_tokens = 12345
    result = run(fake, "sessions", "list")
    assert (result.exit_code, result.stderr) == (0, "")
    head, first, second = result.stdout.splitlines()
    assert head.split()[:5] == ["session", "model", "state", "plan", "tokens"]
    assert first.split() == ["ses_1", "tiny", "ACTIVE", "once", "0/0", "a=b", "c=d"]
    assert second.split()[4] == "12345/0"
    end = head.index("tokens") + len("tokens")
    assert (first[:end][-4:], second[:end][-7:]) == (" 0/0", "12345/0")


@pytest.mark.parametrize(
    ("idle_s", "shown"), [(-30, "0s"), (59.9, "59s"), (60, "1m"), (7200, "2h"), (180_000, "2d")]
)
def test_idle_time_in_its_largest_unit(idle_s: float, shown: str) -> None:
    assert _idle(Timestamp(seconds=1_000_000), 1_000_000 + idle_s) == shown


def test_list_json_is_a_line_each_and_limit_bounds_it(fake: FakeServer) -> None:
    open_sessions(fake, {}, {}, {})
    fake.state["ses_2"].create_time.FromMilliseconds(1_700_000_000_250)
    result = run(fake, "sessions", "list", "--json", "--limit", "2")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["session_id"] for record in records] == ["ses_2", "ses_1"]
    assert records[0]["create_time"] == "2023-11-14T22:13:20.250+00:00"
    assert (records[0]["state"], records[0]["decode_plan"]) == ("ACTIVE", "PLAN_ONCE")
    assert (records[0]["kv_residency"], records[0]["expire_time"]) == ("UNSPECIFIED", None)
    assert records[0]["labels"] == {}
    assert fake.last(session_pb2.ListSessionsRequest).page_size == 2


def test_list_of_none_is_its_headings(fake: FakeServer) -> None:
    result = run(fake, "sessions", "list")
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 1)
    assert run(fake, "sessions", "list", "--json").stdout == ""


@pytest.mark.parametrize("command", [["sessions", "list"], ["sessions", "get", "ses_0"]])
def test_control_characters_of_labels_are_escaped(fake: FakeServer, command: list[str]) -> None:
    open_sessions(fake, {"k\x1b[2J": "a\nb\x9b\u202e[red]"})
    result = run(fake, *command)
    assert result.exit_code == 0
    assert 'k\\x1b[2J="a\\nb\\x9b\\u202e[red]"' in result.stdout
    assert not {"\x1b", "\x9b", "\u202e"} & set(result.stdout)


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        ({"a": "b", "c": "é/1"}, "a=b c=é/1"),
        ({"a b": "c d=e"}, '"a b"="c d=e"'),
        ({"k": "", "q": '"x"', "e": "a=b"}, 'e="a=b" k="" q="\\"x\\""'),
        ({"s": "a\u00a0b"}, 's="a\\xa0b"'),
    ],
)
def test_labels_are_quoted_where_they_would_run_together(
    fake: FakeServer, labels: dict[str, str], shown: str
) -> None:
    open_sessions(fake, labels)
    assert run(fake, "sessions", "list").stdout.splitlines()[1].endswith(f"  {shown}")
    assert run(fake, "sessions", "get", "ses_0").stdout.splitlines()[-1].split(maxsplit=1)[1] == shown


def test_get_tells_the_fields(fake: FakeServer) -> None:
    open_sessions(fake, {"who": "me"})
    fake.state["ses_0"].plan_stats.reuses = 2**63
    lines = dict(line.split(":", 1) for line in run(fake, "sessions", "get", "ses_0").stdout.splitlines())
    assert lines["session"].strip() == "ses_0"
    assert lines["steps"].strip() == f"0 built, {2**63} reused, 0 replanned"
    assert lines["labels"].strip() == "who=me"
    record = json.loads(run(fake, "sessions", "get", "ses_0", "--json").stdout)
    assert (record["session_id"], record["plan_stats"]["reuses"]) == ("ses_0", 2**63)


def test_get_tells_what_steps_took(fake: FakeServer) -> None:
    open_sessions(fake, {})

    def lines() -> dict[str, str]:
        rows = (row.split(":", 1) for row in run(fake, "sessions", "get", "ses_0").stdout.splitlines())
        return {name: value.strip() for name, value in rows}

    assert not {"step time", "last step"} & lines().keys()
    fake.state["ses_0"].plan_stats.MergeFrom(
        session_pb2.PlanStats(
            builds=1, reuses=2, replans=1, plan_ns=6_000_000, step_ns=10_000_000,
            launches_per_step=16, host_bytes_per_step=52, arena_bytes=4096,
        )
    )  # fmt: skip
    assert lines()["step time"] == "1.500 ms for the plan, 2.500 ms to run, a mean over the steps"
    assert lines()["last step"] == "16 launches, 52 bytes between host and program, arena of 4096 bytes"


def test_update_changes_what_is_given_and_shows_the_session(fake: FakeServer) -> None:
    open_sessions(fake, {"who": "me", "a": "b"})
    result = run(
        fake, "sessions", "update", "ses_0", "--plan", "REPLAN", "--label", "who=you", "--label", "k=x="
    )
    assert (result.exit_code, result.stderr) == (0, "")
    request = fake.last(session_pb2.UpdateSessionRequest)
    assert (request.session_id, request.decode_plan) == ("ses_0", session_pb2.PAGED_DECODE_PLAN_REPLAN)
    assert dict(request.labels) == {"who": "you", "k": "x="}
    assert not request.HasField("priority")
    lines = dict(line.split(":", 1) for line in result.stdout.splitlines())
    assert (lines["plan"].strip(), lines["labels"].strip()) == ("replan", 'a=b k="x=" who=you')
    result = run(fake, "sessions", "update", "ses_0", "--plan", "once", "--priority", "-2", "--json")
    record = json.loads(result.stdout)
    assert (record["decode_plan"], record["priority"]) == ("PLAN_ONCE", -2)


def test_update_takes_no_plan_from_the_environment(fake: FakeServer) -> None:
    open_sessions(fake, {})
    env = {"PAGECAST_TARGET": fake.target, "PAGECAST_PLAN": "replan", "PAGECAST_PRIORITY": "3"}
    for flags, code in ((["--label", "a=b"], 0), ([], 2)):
        assert CliRunner().invoke(main, ["sessions", "update", "ses_0", *flags], env=env).exit_code == code
    request = fake.last(session_pb2.UpdateSessionRequest)
    assert request == session_pb2.UpdateSessionRequest(session_id="ses_0", labels={"a": "b"})


def test_update_that_is_refused_is_one_line(fake: FakeServer) -> None:
    open_sessions(fake, {})
    full = "the worker's limit of open sessions in REPLAN (1, --max-replan-sessions) is reached"
    fake.refusals["UpdateSession"] = Refusal(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", full, "decode_plan"
    )
    result = run(fake, "sessions", "update", "ses_0", "--plan", "replan")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: QUOTA_EXCEEDED: {full} (field decode_plan)\n"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "Nothing to change: give --plan, --priority or --label."),
        (["--plan", "twice"], "--plan"),
        (["--priority", "2147483648"], "--priority"),
        (["--label", "a"], "'a' has no =."),
        (["--label", "=b"], "'=b' has no key before =."),
        (["--label", "a=\udcff"], "is not UTF-8."),
        (["--label", f"a={'é' * 129}"], "a key or value is over 256 bytes."),
        (["--label", "a=b", "--label", "a=c"], "'a' is given twice."),
        ([word for at in range(65) for word in ("--label", f"{at}=")], "is given 65 times; at most 64."),
    ],
)
def test_wrong_flags_of_update(fake: FakeServer, flags: list[str], told: str) -> None:
    result = run(fake, "sessions", "update", "ses_0", *flags)
    assert (result.exit_code, result.stdout, fake.requests) == (2, "", [])
    assert told in result.stderr


def test_get_of_none_fails(fake: FakeServer) -> None:
    result = run(fake, "sessions", "get", "ses_9")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: SESSION_NOT_FOUND: ")


def test_close_tries_every_id(fake: FakeServer) -> None:
    open_sessions(fake, {}, {}, {})
    result = run(fake, "sessions", "close", "ses_0", "ses_9", "ses_8", "ses_2")
    assert (result.exit_code, result.stdout) == (1, "ses_0\nses_2\n")
    told = [line.split(": ")[:3] for line in result.stderr.splitlines()]
    assert told == [["error", session_id, "SESSION_NOT_FOUND"] for session_id in ("ses_9", "ses_8")]
    closed = [fake.state[f"ses_{at}"].state == session_pb2.SESSION_STATE_CLOSED for at in range(3)]
    assert closed == [True, False, True]
    assert run(fake, "sessions", "close", "ses_0", "ses_1").exit_code == 0


def test_a_refusal_in_the_middle_of_a_list_keeps_what_was_read(fake: FakeServer) -> None:
    open_sessions(fake, {})
    fake.refusals["ListSessions"] = Refusal(grpc.StatusCode.UNAVAILABLE, "DRAINING", "the server stops")
    result = run(fake, "sessions", "list", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: DRAINING: the server stops\n"


@pytest.mark.parametrize(
    "arguments",
    [["close"], ["get"], ["list", "--limit", "0"], ["get", "\udcff"], ["x"], ["get", ""], ["close", "a", ""]],
)
def test_wrong_arguments(fake: FakeServer, arguments: list[str]) -> None:
    assert run(fake, "sessions", *arguments).exit_code == 2
    assert fake.requests == []
