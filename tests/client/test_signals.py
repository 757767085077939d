"""Signals whose handlers raise, at any moment of a call: the client goes on, and closes at once."""

import subprocess
import sys
import threading
import time

import pytest

import pagecast
from pagecast import _calls
from pagecast.v1 import session_pb2
from tests.client.fake_server import FakeServer

ROUNDS = 150
# A timer's signal, since a thread that sends one would itself be left half-way by what it raises.
CHILD = """
import random, signal, sys, time
import pagecast

signal.signal(signal.SIGALRM, signal.default_int_handler)
seed, rounds, raised = int(sys.argv[2]), int(sys.argv[3]), 0
draw = random.Random(seed)
client = pagecast.Client(sys.argv[1])
session = client.open_session("tiny")
for _ in range(rounds):
    try:
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.00001, 0.004))
        with session.generate("abc") as generation:
            generation.wait()
        session.get()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        raised += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
assert session.generate("last").wait().text == "last"
began_s = time.monotonic()
try:
    signal.setitimer(signal.ITIMER_REAL, 0.00005)
    client.close()
except KeyboardInterrupt:
    client.close()
signal.setitimer(signal.ITIMER_REAL, 0)
print(raised, time.monotonic() - began_s < 2.0)
"""


def test_a_signal_at_any_moment_leaves_a_client_that_works_and_closes(fake: FakeServer) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, fake.target, str(seed), str(ROUNDS)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(4)
    ]
    try:
        for child in children:
            out, _ = child.communicate(timeout=20)
            raised, closed_at_once = out.split()
            assert (child.returncode, closed_at_once) == (0, "True")
            assert int(raised) > ROUNDS // 10
    finally:
        for child in children:
            child.kill()  # does nothing to one that has ended
            child.wait(5)


def test_a_call_that_a_signal_leaves_is_cancelled(fake: FakeServer) -> None:
    code = """
import signal, sys, time
import pagecast

signal.signal(signal.SIGALRM, signal.default_int_handler)
with pagecast.Client(sys.argv[1]) as client:
    session = client.open_session("tiny")
    generation = session.generate("abc")
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        generation.wait()
    except KeyboardInterrupt:
        print(generation.text, flush=True)
    del generation
    time.sleep(10)
"""
    fake.hold_after = 2
    with subprocess.Popen(
        [sys.executable, "-c", code, fake.target], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ab\n"
            assert fake.ended.wait(5)
            assert child.poll() is None
        finally:
            child.kill()


def test_closing_never_waits_for_long(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    client, freed = pagecast.Client(fake.target), threading.Event()
    monkeypatch.setattr(_calls, "_CLOSE_TIMEOUT_S", 0.2)
    close = client._connection._channel.close
    monkeypatch.setattr(client._connection._channel, "close", lambda: (freed.wait(10), close()))
    began_s = time.monotonic()
    client.close()
    assert time.monotonic() - began_s < 2.0
    freed.set()
    with pytest.raises(ValueError, match="Channel closed"):
        client.models()


def test_calls_can_be_made_at_exit_and_closing_twice_is_no_error(fake: FakeServer) -> None:
    code = """
import atexit, sys
atexit.register(lambda: (print(session.close().state), client.close(), client.close()))
import pagecast
client = pagecast.Client(sys.argv[1])
session = client.open_session("tiny")
"""
    child = [sys.executable, "-c", code, fake.target]
    result = subprocess.run(child, capture_output=True, text=True, timeout=10, check=True)
    assert (result.stdout, result.stderr) == (f"{session_pb2.SESSION_STATE_CLOSED}\n", "")


def test_threads_end_with_what_they_were_for(fake: FakeServer) -> None:
    before = set(threading.enumerate())
    with pagecast.Client(fake.target) as client:
        session = client.open_session("tiny")
        for _ in range(3):
            assert session.generate("abc").wait().text == "abc"
        fake.hold_after = 1
        next(generation := session.generate("abc"))
        del generation
        assert fake.ended.wait(5)
    del client, session
    until_s = time.monotonic() + 5.0
    while (left := _threads() - before) and time.monotonic() < until_s:
        time.sleep(0.02)
    assert not left


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("pagecast")}
