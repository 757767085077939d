"""Where the blocking client touches gRPC: threads that no signal's handler can raise in.

Python runs the handlers of signals on the main thread, between any two steps. One that raises (Ctrl-C's
does) inside of gRPC leaves its locks held and its calls unattended, and closing the channel then waits
for ever. So other threads make, read and cancel the calls, and callers wait at queues, which a handler
may leave by raising. Knows no method and no message.
"""

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import grpc

from pagecast import _failures

_T = TypeVar("_T")
_Answer_co = TypeVar("_Answer_co", covariant=True)
_Job = Callable[[], object]


class _Future(Protocol[_Answer_co]):
    """What `future` of gRPC's stubs returns."""

    def add_done_callback(self, fn: Callable[[Any], None]) -> None: ...
    def result(self) -> _Answer_co: ...
    def cancel(self) -> bool: ...


class GrpcThread:
    """A thread that does short jobs in the order given, until nothing refers to this object."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), name="pagecast", daemon=True).start()
        # Not at the program's end: what runs at exit may still make calls.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def put(self, job: _Job) -> None:
        """Have a job done that neither waits nor raises; of any thread, also from `__del__`."""
        self._jobs.put(job)

    def run(self, job: Callable[[], _T], timeout_s: float | None = None) -> _T:
        """Have a job done and wait for what it returns. Raises queue.Empty after `timeout_s` seconds."""
        answers: SimpleQueue[_T] = SimpleQueue()
        self._jobs.put(lambda: answers.put(job()))
        return answers.get(timeout=timeout_s)

    def call(self, start: Callable[[], "_Future[_T]"], deadline_s: float | None) -> _T:
        """Wait for a call's answer.

        Args:
            start: Makes the call.
            deadline_s: The deadline that it gives the call, in seconds; None: none.

        Raises:
            pagecast.PagecastError: The call failed.
            BaseException: What a signal's handler raised; the call is cancelled.
        """
        made: list[_Future[_T]] = []
        ends: SimpleQueue[_T | BaseException] = SimpleQueue()

        def make() -> None:
            try:
                made.append(start())
                made[0].add_done_callback(lambda call: ends.put(_outcome(call, deadline_s)))
            except Exception as error:  # noqa: BLE001  raised where the call was asked for
                ends.put(error)

        try:
            self._jobs.put(make)
            end = ends.get()
        except BaseException:
            self._jobs.put(lambda: [call.cancel() for call in made])
            raise
        if isinstance(end, BaseException):
            raise end
        return end


class Stream(Generic[_T]):
    """The responses of one call, read one ahead by a thread of its own; dropping it cancels the call.

    Args:
        thread: Makes the call, and cancels it.
        start: Does so.
        timeout_s: The deadline that it gives the call, in seconds; None: none.
    """

    def __init__(self, thread: GrpcThread, start: Callable[[], Any], timeout_s: float | None) -> None:
        self._thread = thread
        self._reading: _Reading[_T] = _Reading(timeout_s)
        self._reading.wishes.put(True)
        thread.put(partial(self._reading.start, start))

    def next(self) -> _T | None:
        """The next response; None at the end. Raises what the call failed with."""
        reading = self._reading
        answer = None
        if not (reading.has_ended and reading.answers.empty()):
            # First the wish: who is interrupted at the next line may come again.
            reading.wishes.put(True)
            answer = reading.answers.get()
        if answer is None and reading.failure is not None:
            raise reading.failure
        return answer

    def cancel(self) -> bool:
        """End the call; return whether that is how it ends."""
        return not self._reading.has_ended and self._thread.run(self._reading.cancel)

    def __del__(self) -> None:
        reading: _Reading[_T] | None = getattr(self, "_reading", None)
        if reading is None:  # `__init__` was left
            return
        reading.wishes.put(False)
        if not reading.has_ended:
            self._thread.put(reading.cancel)


class _Reading(Generic[_T]):
    """What a stream shares with its threads, which must not keep the stream itself alive.

    Attributes:
        call: None until it has been made.
        has_ended: Whether no more answers come.
        failure: What the call failed with, where it did; set before `has_ended`.
        wishes: True for each response that may be read; False: no more.
        answers: The responses; None: the end.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.call: Any = None
        self.has_ended = False
        self.failure: BaseException | None = None
        self.wishes: SimpleQueue[bool] = SimpleQueue()
        self.answers: SimpleQueue[_T | None] = SimpleQueue()
        self._timeout_s = timeout_s

    def start(self, make: Callable[[], Any]) -> None:
        try:
            self.call = make()
            threading.Thread(target=self._read, name="pagecast-stream", daemon=True).start()
        except Exception as error:  # noqa: BLE001  raised where the responses are read
            self.cancel()
            self._finish(error)

    def cancel(self) -> bool:
        if self.call is None:
            return False
        self.call.cancel()
        return bool(self.call.code() is grpc.StatusCode.CANCELLED)

    def _read(self) -> None:
        try:
            while self.wishes.get():
                self.answers.put(next(self.call))
        except StopIteration:
            self._finish(None)
        except grpc.RpcError as error:
            self._finish(_failure(error, self._timeout_s))
        except Exception as error:  # noqa: BLE001  raised where the responses are read
            self._finish(error)

    def _finish(self, failure: BaseException | None) -> None:
        self.failure = failure
        self.has_ended = True
        self.answers.put(None)


def _work(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # what it refers to need not wait for the next


def _outcome(call: "_Future[_T]", deadline_s: float | None) -> "_T | BaseException":
    """What a call that has ended answered, or failed with."""
    try:
        return call.result()
    except grpc.RpcError as error:
        return _failure(error, deadline_s)
    except grpc.FutureCancelledError:
        return _failures.cancelled()
    except Exception as error:  # noqa: BLE001  raised where the call was asked for
        return error


def _failure(error: Any, timeout_s: float | None) -> BaseException:
    failure = _failures.decode(error, timeout_s)
    failure.__cause__ = error
    return failure
