"""Sessions that are open on a server: listed, looked at, changed, closed."""

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import orjson
from google.protobuf.timestamp_pb2 import Timestamp

import pagecast
from pagecast.v1 import session_pb2
from service.commands.records import enum_name, json_line, record
from service.terminal import Output, visible

_MAX_PAGE = 1000
_HEADINGS = ("session", "model", "state", "plan", "tokens", "idle", "labels")
_NUMBERS = ("tokens", "idle")


def list_sessions(client: pagecast.Client, out: Output, limit: int | None, *, as_json: bool) -> None:
    """Write sessions to `out`, newest first: a table, or one line of JSON for each as it is read.

    Args:
        client: Whose sessions.
        out: Where to.
        limit: At most so many; None: all.
        as_json: See above.

    Raises:
        OutputError: `out` cannot be written to.
        pagecast.PagecastError: A call failed.
    """
    page_size = _MAX_PAGE if limit is None else min(limit, _MAX_PAGE)
    sessions = islice(client.sessions(page_size=page_size), limit)
    if as_json:
        for session in sessions:
            out.write(json_line(record(session)))
        return
    now_s = time.time()
    out.table(_HEADINGS, [_row(session, now_s) for session in sessions], _NUMBERS)


def get_session(client: pagecast.Client, session_id: str, out: Output, *, as_json: bool) -> None:
    """Write one session to `out`: a line per field, or one line of JSON. Raises as `list_sessions`."""
    session = client.session(session_id).get()
    out.write(json_line(record(session)) if as_json else details(session))


def update_session(
    client: pagecast.Client,
    session_id: str,
    out: Output,
    plan: pagecast.PagedDecodePlan | None,
    priority: int | None,
    labels: Mapping[str, str],
    *,
    as_json: bool,
) -> None:
    """Change one session and write it as it is then; the form as of `get_session`.

    Args:
        client: Whose session.
        session_id: Which.
        out: Where to.
        plan: None: stays.
        priority: None: stays.
        labels: Added, or in place of those of the same keys; the others stay.
        as_json: One line of JSON.

    Raises:
        OutputError: `out` cannot be written to.
        pagecast.PagecastError: The session stays as it was.
    """
    session = client.session(session_id).update(plan=plan, priority=priority, labels=labels or None)
    out.write(json_line(record(session)) if as_json else details(session))


def close_sessions(
    client: pagecast.Client, session_ids: Iterable[str], out: Output
) -> Mapping[str, pagecast.PagecastError]:
    """Close sessions and write the ids of those that are closed now, one a line.

    Returns:
        What the others were refused with, by id.

    Raises:
        OutputError: `out` cannot be written to.
        pagecast.Unavailable: No server answers.
    """
    refused = {}
    for session_id in session_ids:
        try:
            client.session(session_id).close()
        except pagecast.PagecastError as error:
            if error.reason == "UNAVAILABLE":  # the others would fare the same
                raise
            refused[session_id] = error
        else:
            out.write(f"{visible(session_id)}\n")
    return refused


def details(session: session_pb2.Session) -> str:
    """A session for people: a line per field that says something."""
    plans = session.plan_stats
    rows = {
        "session": session.session_id,
        "model": session.model,
        "state": _state(session),
        "plan": plan_name(session),
        "steps": f"{plans.builds} built, {plans.reuses} reused, {plans.replans} replanned",
        "step time": _step_time(plans),
        "last step": _last_step(plans),
        "revision": str(session.revision),
        "tokens": f"{session.num_tokens} of {session.max_context_tokens}",
        "kv": f"{session.num_computed_tokens} tokens in {session.num_kv_blocks} blocks",
        "priority": str(session.priority),
        "created": _time(session.create_time),
        "last active": _time(session.last_active_time),
        "labels": _labels(session),
    }
    return "".join(f"{name + ':':13}{visible(value)}\n" for name, value in rows.items() if value)


def _step_time(plans: session_pb2.PlanStats) -> str:
    """Means over the session's steps; empty without any."""
    num_steps = plans.builds + plans.reuses + plans.replans
    if num_steps == 0:
        return ""
    plan_ms, run_ms = (total_ns / num_steps / 1e6 for total_ns in (plans.plan_ns, plans.step_ns))
    return f"{plan_ms:.3f} ms for the plan, {run_ms:.3f} ms to run, a mean over the steps"


def _last_step(plans: session_pb2.PlanStats) -> str:
    if plans.launches_per_step == 0:
        return ""
    return (
        f"{plans.launches_per_step} launches, {plans.host_bytes_per_step} bytes between host and program, "
        f"arena of {plans.arena_bytes} bytes"
    )


def _row(session: session_pb2.Session, now_s: float) -> Sequence[str]:
    return (
        session.session_id,
        session.model,
        _state(session),
        plan_name(session),
        f"{session.num_tokens}/{session.max_context_tokens}",
        _idle(session.last_active_time, now_s),
        _labels(session),
    )


def _state(session: session_pb2.Session) -> str:
    return enum_name(session_pb2.SessionState.DESCRIPTOR, session.state)


def plan_name(session: session_pb2.Session) -> str:
    """How the session's decode step gets its plan, as the flags call it."""
    name = enum_name(session_pb2.PagedDecodePlan.DESCRIPTOR, session.decode_plan)
    return name.removeprefix("PLAN_").lower()


def _labels(session: session_pb2.Session) -> str:
    return " ".join(f"{_quoted(key)}={_quoted(value)}" for key, value in sorted(session.labels.items()))


def _quoted(text: str) -> str:
    """In JSON's quotes where it would otherwise not be seen where it begins and ends."""
    plain = text and not any(char.isspace() or char in '"=' for char in text)
    return text if plain else orjson.dumps(text).decode()


def _idle(since: Timestamp, now_s: float) -> str:
    """How long ago by this machine's clock, in the largest unit that it fills; empty where not known."""
    if not since.seconds:
        return ""
    idle_s = max(0, int(now_s) - since.seconds)  # the server's clock may be ahead
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if idle_s >= length_s:
            return f"{idle_s // length_s}{unit}"
    return f"{idle_s}s"


def _time(stamp: Timestamp) -> str:
    if not stamp.seconds:
        return ""
    return stamp.ToDatetime().isoformat(sep=" ", timespec="seconds") + "Z"
