"""First answers of calls that carry a `request_id`, for their retries. In memory only.

Knows requests by their bytes; does not know sessions or workers. A call that was refused, that
failed or whose turn was rolled back leaves no record, so that its retry runs anew. A retry that
comes while the first call runs waits for it; what is being undone because all callers left ends
first.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

from google.protobuf.message import Message

from service.errors import PagecastError, Reason
from service.turns import Turn

# The least recently used records go first.
MAX_RECORDS = 10_000
MAX_BYTES = 64 * 1024 * 1024
# Key, identity and bookkeeping of a record, beside its answer.
RECORD_BYTES = 1024

Answer = TypeVar("Answer", bound=Message)
Value = TypeVar("Value")


class Request(Protocol):
    """What a mutating call is asked with: any of the messages that have a `request_id`."""

    @property
    def request_id(self) -> str:
        """The caller's UUID."""
        ...


@dataclass(slots=True)
class _Record(Generic[Value]):
    """One call. `identity` tells its method and payload; `size_bytes` is known once it is kept."""

    identity: bytes
    value: Value
    size_bytes: int = 0


@dataclass(slots=True)
class _Running(Generic[Answer]):
    """A unary call that runs apart from those who wait for it."""

    task: asyncio.Task[Answer]
    num_callers: int = 0
    is_leaving: bool = False


class Replays:
    """Remembers first answers, bounded in number and bytes; calls that run are on top of that."""

    def __init__(self, *, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._running: dict[str, _Record[Any]] = {}
        self._kept: OrderedDict[str, _Record[Any]] = OrderedDict()
        self._num_bytes = 0

    async def answer(
        self,
        method: str,
        request: Message,
        run: Callable[[], Coroutine[Any, Any, Answer]],
        *,
        is_undone_when_left: bool = False,
    ) -> Answer:
        """Return the first answer to this request id, running the call if there is none.

        Args:
            method: Name of the RPC.
            request: Checked; without a `request_id` it simply runs.
            run: The call. Under a request id it runs as a task of its own.
            is_undone_when_left: Whether it is cancelled, and then undoes itself, when all callers have
                left; otherwise it runs to its end and its answer is kept.

        Raises:
            PagecastError: REQUEST_ID_REUSED, or whatever `run` raises.
        """
        if not request.HasField("request_id"):
            return await run()
        key, identity = _key(request), _identity(method, request)
        while True:
            running = cast("_Running[Answer] | None", self._find(key, identity))
            if running is None:
                running = self._run(key, identity, run)
            if running.task.done() or not running.is_leaving:
                break
            await asyncio.wait([running.task])
        running.num_callers += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.num_callers -= 1
            if is_undone_when_left and running.num_callers == 0 and not running.task.done():
                running.is_leaving = True
                running.task.cancel()

    async def turn(self, method: str, request: Message, start: Callable[[], Turn]) -> Turn:
        """Return the turn that this request id started first, starting it if there is none.

        Args:
            method: Name of the RPC.
            request: Checked, with a `request_id`.
            start: Starts a turn that keeps all of its events.

        Raises:
            PagecastError: REQUEST_ID_REUSED, or whatever `start` raises.
        """
        key, identity = _key(request), _identity(method, request)
        while True:
            turn = cast("Turn | None", self._find(key, identity))
            if turn is None:
                turn = start()
                record = self._begin(key, identity, turn)
                turn.when_over(partial(self._settle_turn, key, record))
            if turn.is_over or not turn.is_leaving:
                return turn
            await turn.ended()

    def _find(self, key: str, identity: bytes) -> object | None:
        """Return what is known under `key`. Raises PagecastError REQUEST_ID_REUSED."""
        record = self._running.get(key) or self._kept.get(key)
        if record is None:
            return None
        if record.identity != identity:
            raise PagecastError(
                Reason.REQUEST_ID_REUSED, "this request_id was used for another request", field="request_id"
            )
        if key in self._kept:
            self._kept.move_to_end(key)
        value: object = record.value
        return value

    def _run(
        self, key: str, identity: bytes, run: Callable[[], Coroutine[Any, Any, Answer]]
    ) -> _Running[Answer]:
        running = _Running(asyncio.create_task(run()))
        record = self._begin(key, identity, running)
        running.task.add_done_callback(partial(self._settle_answer, key, record))
        return running

    def _begin(self, key: str, identity: bytes, value: Value) -> _Record[Value]:
        record = self._running[key] = _Record(identity, value)
        return record

    def _settle_answer(self, key: str, record: _Record[_Running[Answer]], task: asyncio.Task[Answer]) -> None:
        del self._running[key]
        # Read also where nobody waits for it any more: a failure is no record, and no leak of a task.
        if not task.cancelled() and task.exception() is None:
            self._keep(key, record, task.result().ByteSize())

    def _settle_turn(self, key: str, record: _Record[Turn]) -> None:
        del self._running[key]
        if record.value.is_committed:
            record.value.compact()
            self._keep(key, record, record.value.num_bytes)

    def _keep(self, key: str, record: _Record[Any], num_bytes: int) -> None:
        record.size_bytes = RECORD_BYTES + num_bytes
        self._kept[key] = record
        self._num_bytes += record.size_bytes
        while len(self._kept) > self._max_records or self._num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.size_bytes


def _key(request: Message) -> str:
    """The request id in one spelling: a UUID's digits have no case."""
    return cast("Request", request).request_id.lower()


def _identity(method: str, request: Message) -> bytes:
    """What makes two requests the same: the method and every field but the request id."""
    payload = type(request)()
    payload.CopyFrom(request)
    payload.ClearField("request_id")
    # Deterministic: maps have no order of their own.
    return hashlib.sha256(method.encode() + b"\0" + payload.SerializeToString(deterministic=True)).digest()
