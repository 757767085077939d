"""Which worker holds which session. Pure: no calls, no clock, no randomness.

Knows sessions by id and by how they were last seen, and workers by the model they serve and whether they
are lost. A worker here is one process: when it is lost its sessions have failed, and the one that comes in
its place is another.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from pagecast.v1 import model_pb2, session_pb2
from service.errors import PagecastError, Reason, cut

# Closed sessions are remembered so that they can be read and closed again, failed ones so that their end is
# told and they can be closed. A closed one takes about 350 bytes of memory, a failed one 2 KB, and both their
# labels, of up to 32 KiB: hence a limit in bytes of their messages too.
MAX_CLOSED = 10_000
MAX_FAILED = 10_000
MAX_CLOSED_BYTES = 16 * 1024 * 1024
MAX_FAILED_BYTES = 16 * 1024 * 1024
# Of the names in a message that tells which models there are.
_MAX_NAMES_BYTES = 100


class _Flag(Protocol):
    def is_set(self) -> bool: ...


class Worker(Protocol):
    """What the router asks of a worker."""

    @property
    def model(self) -> model_pb2.Model:
        """What it serves."""
        ...

    @property
    def lost(self) -> _Flag:
        """Set once it is lost, for good."""
        ...


W = TypeVar("W", bound=Worker)


@dataclass(slots=True)
class _Entry(Generic[W]):
    """A session that is not closed.

    Attributes:
        number: Orders sessions by when they were placed.
        model: Name of its model.
        worker: Who holds it; None once it is known to have failed.
        snapshot: As it was last seen, and `num_tokens` of it as it was last committed; None while it is
            being opened.
        is_given_up: Whether it has failed though its worker is there.
    """

    number: int
    model: str
    worker: W | None
    snapshot: session_pb2.Session | None = None
    is_given_up: bool = False

    @property
    def is_orphan(self) -> bool:
        """Whether its worker is lost."""
        return self.worker is None or self.worker.lost.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether nothing can be done with it but to read and close it."""
        return self.is_given_up or self.is_orphan


class Router(Generic[W]):
    """Maps sessions to workers; remembers the last closed and failed ones, bounded in number and bytes."""

    def __init__(self, workers: Sequence[W] = ()) -> None:
        self._workers: list[W] = []
        # In the order of their numbers.
        self._entries: dict[str, _Entry[W]] = {}
        # Serialised: a message of 160 bytes takes 1.8 KB of memory.
        self._closed: OrderedDict[str, bytes] = OrderedDict()
        self._closed_bytes = 0
        self._known_models: set[str] = set()
        # Of live workers, by identity: two workers may compare equal.
        self._num_sessions: dict[int, int] = {}
        self._last_number = 0
        for worker in workers:
            self.add(worker)

    def add(self, worker: W) -> None:
        """Place sessions on this worker too; those that are lost are let go."""
        self._workers = [known for known in self._workers if not known.lost.is_set()] + [worker]
        self._known_models.add(worker.model.name)
        self._num_sessions = {id(known): self._num_sessions.get(id(known), 0) for known in self._workers}
        for entry in self._entries.values():
            if entry.is_orphan:
                entry.worker = None
        self._forget_failed()

    def _forget_failed(self) -> None:
        """Let go of the oldest failed sessions that are over the limits."""
        failed = [session_id for session_id, entry in self._entries.items() if entry.has_failed]
        num_bytes = 0
        for count, session_id in enumerate(reversed(failed), start=1):
            entry = self._entries[session_id]
            num_bytes += 0 if entry.snapshot is None else entry.snapshot.ByteSize()
            if count > MAX_FAILED or num_bytes > MAX_FAILED_BYTES:
                del self._entries[session_id]

    def models(self) -> list[model_pb2.Model]:
        """Return the models of live workers, each once, by name."""
        by_name = {worker.model.name: worker.model for worker in self._live()}
        return [by_name[name] for name in sorted(by_name)]

    def model(self, name: str) -> model_pb2.Model:
        """Return the model of that name. Raises as `place` does."""
        return self.link_of_model(name).model

    def link_of_model(self, model: str) -> W:
        """Return any live worker of the model. Raises as `place` does."""
        return self._candidates(model)[0]

    def place(self, session_id: str, model: str, *, besides: Collection[W] = ()) -> W:
        """Give a new session to the live worker of `model` with the fewest sessions.

        Args:
            session_id: Of the new session.
            model: What the worker has to serve.
            besides: Workers that have no place for it.

        Raises:
            PagecastError: MODEL_NOT_FOUND where no worker ever served it; NO_WORKER while none does, or
                none but those of `besides`.
        """
        full = {id(worker) for worker in besides}
        workers = [worker for worker in self._candidates(model) if id(worker) not in full]
        if not workers:
            raise PagecastError(Reason.NO_WORKER, "no worker of this model has a place")
        worker = min(workers, key=lambda worker: self._num_sessions[id(worker)])
        self._num_sessions[id(worker)] += 1
        self._last_number += 1
        self._entries[session_id] = _Entry(self._last_number, model, worker)
        return worker

    def find(self, session_id: str) -> W:
        """Return the worker that holds a session.

        Raises:
            PagecastError: SESSION_FAILED where it is lost or given up; SESSION_CLOSED or SESSION_NOT_FOUND.
        """
        entry = self._entries.get(session_id)
        if entry is not None and entry.worker is not None and not entry.has_failed:
            return entry.worker
        reason, message = Reason.SESSION_NOT_FOUND, "no session has this id"
        if entry is not None and entry.is_given_up:
            reason, message = Reason.SESSION_FAILED, "the session was given up: a turn's end is not known"
        elif entry is not None:
            reason, message = Reason.SESSION_FAILED, "the session was lost with its worker"
        elif session_id in self._closed:
            reason, message = Reason.SESSION_CLOSED, "the session is closed"
        raise PagecastError(reason, message, field="session_id", metadata={"session": session_id})

    def remember(self, session: session_pb2.Session) -> None:
        """Keep how a session was last seen, for when its worker is gone; ids not placed are fine."""
        entry = self._entries.get(session.session_id)
        if entry is None:
            return
        known, entry.snapshot = entry.snapshot, _without_kv(session)
        if known is not None and session.revision <= known.revision:
            # It may count a running turn's tokens, or be older than the end of a turn that came since.
            entry.snapshot.revision, entry.snapshot.num_tokens = known.revision, known.num_tokens

    def commit(self, session_id: str, revision: int, num_tokens: int) -> None:
        """Note how long a session's log is after a committed turn; ids not placed are fine."""
        snapshot = self.snapshot(session_id)
        if snapshot is not None and revision >= snapshot.revision:
            snapshot.revision, snapshot.num_tokens = revision, num_tokens

    def give_up(self, session_id: str) -> None:
        """Let a session have failed though its worker is there; unknown and failed ids are fine."""
        entry = self._entries.get(session_id)
        if entry is not None and not entry.has_failed:
            self._num_sessions[id(entry.worker)] -= 1
            entry.is_given_up = True
            self._forget_failed()

    def snapshot(self, session_id: str) -> session_pb2.Session | None:
        """Return how a session was last seen, without what its KV took; None if it is not open or failed."""
        entry = self._entries.get(session_id)
        return None if entry is None else entry.snapshot

    def failed(self, session_id: str) -> session_pb2.Session | None:
        """Return a session that has failed as it was last seen, FAILED; None if it has not."""
        entry = self._entries.get(session_id)
        if entry is None or not entry.has_failed:
            return None
        session = session_pb2.Session(session_id=session_id, model=entry.model)
        if entry.snapshot is not None:
            session.CopyFrom(entry.snapshot)
        session.state = session_pb2.SESSION_STATE_FAILED
        session.kv_residency = session_pb2.KV_RESIDENCY_DROPPED
        return session

    def closed(self, session_id: str) -> session_pb2.Session | None:
        """Return a closed session as it was left; None if it is not closed or no longer remembered."""
        kept = self._closed.get(session_id)
        return None if kept is None else session_pb2.Session.FromString(kept)

    def close(self, session: session_pb2.Session) -> None:
        """Forget where a session is, and remember it as closed, once."""
        self.forget(session.session_id)
        if session.session_id in self._closed:
            return
        kept = self._closed[session.session_id] = session.SerializeToString()
        self._closed_bytes += len(kept)
        while len(self._closed) > MAX_CLOSED or self._closed_bytes > MAX_CLOSED_BYTES:
            _, oldest = self._closed.popitem(last=False)
            self._closed_bytes -= len(oldest)

    def forget(self, session_id: str) -> None:
        """Drop a session that was placed; unknown ids are fine."""
        entry = self._entries.pop(session_id, None)
        if entry is not None and not entry.has_failed:
            self._num_sessions[id(entry.worker)] -= 1

    def held_by(self, worker: W) -> list[str]:
        """Return the ids of the sessions on a worker; one that is lost counts until the next `add`."""
        return [session_id for session_id, entry in self._entries.items() if entry.worker is worker]

    def page(self, before: int | None, size: int) -> list[tuple[int, str]]:
        """Return (number, id) of up to `size` open and failed sessions, the newest first.

        Args:
            before: Only those of a lower number, that is, placed earlier; None: from the newest on.
            size: At least 1.
        """
        return list(islice(self._newest_first(before), size))

    def _newest_first(self, before: int | None) -> Iterator[tuple[int, str]]:
        for session_id, entry in reversed(self._entries.items()):
            # One without a snapshot is being opened: nobody knows its id yet.
            if entry.snapshot is not None and (before is None or entry.number < before):
                yield entry.number, session_id

    def _live(self) -> list[W]:
        return [worker for worker in self._workers if not worker.lost.is_set()]

    def _candidates(self, model: str) -> list[W]:
        """Return the live workers that serve `model`, at least one."""
        live = [worker for worker in self._live() if worker.model.name == model]
        if not live and model not in self._known_models:
            raise PagecastError(
                Reason.MODEL_NOT_FOUND, f"no such model; served: {_listed(self._known_models)}",
                field="model", metadata={"model": model},
            )  # fmt: skip
        if not live:
            raise PagecastError(Reason.NO_WORKER, "no worker of this model is there")
        return live


def _listed(names: Collection[str]) -> str:
    """Return names in order, as many as a message has room for; the first one is cut where it is too long."""
    first, *others = sorted(names) or ["none"]
    text = first if len(first.encode()) <= _MAX_NAMES_BYTES else cut(first, _MAX_NAMES_BYTES) + "…"
    for name in others:
        if len(f"{text}, {name}".encode()) > _MAX_NAMES_BYTES:
            return f"{text}, …"
        text = f"{text}, {name}"
    return text


def _without_kv(session: session_pb2.Session) -> session_pb2.Session:
    """Return a copy that says nothing of KV, which is over as soon as it is told."""
    kept = session_pb2.Session()
    kept.CopyFrom(session)
    kept.kv_residency = session_pb2.KV_RESIDENCY_DROPPED
    kept.num_kv_blocks = kept.num_computed_tokens = kept.num_shared_tokens = 0
    return kept
