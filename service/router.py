"""Which worker holds which session. Pure: no calls, no clock, no randomness.

Knows sessions by id and workers by the model they serve and whether they are lost.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from pagecast.v1 import model_pb2, session_pb2
from service.errors import PagecastError, Reason

# A closed session is remembered so that closing it again is answered; about 500 bytes each.
MAX_CLOSED = 10_000


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
        """Set once it is lost."""
        ...


W = TypeVar("W", bound=Worker)


class Router(Generic[W]):
    """Maps sessions to workers, and remembers the last `MAX_CLOSED` closed ones."""

    def __init__(self, workers: Sequence[W]) -> None:
        self._workers = tuple(workers)
        self._index_of: dict[str, int] = {}
        self._num_sessions = [0] * len(self._workers)
        self._closed: OrderedDict[str, session_pb2.Session] = OrderedDict()

    def models(self) -> list[model_pb2.Model]:
        """Return the models of live workers, each once, by name."""
        by_name = {worker.model.name: worker.model for worker in self._workers if not worker.lost.is_set()}
        return [by_name[name] for name in sorted(by_name)]

    def model(self, name: str) -> model_pb2.Model:
        """Return the model of that name. Raises as `place` does."""
        return self._workers[self._candidates(name)[0]].model

    def place(self, session_id: str, model: str) -> W:
        """Give a new session to the live worker of `model` with the fewest sessions.

        Raises:
            PagecastError: MODEL_NOT_FOUND; NO_WORKER when every worker of the model is lost.
        """
        index = min(self._candidates(model), key=lambda index: (self._num_sessions[index], index))
        self._index_of[session_id] = index
        self._num_sessions[index] += 1
        return self._workers[index]

    def find(self, session_id: str) -> W:
        """Return the worker that holds a session, lost or not.

        Raises:
            PagecastError: SESSION_CLOSED or SESSION_NOT_FOUND.
        """
        index = self._index_of.get(session_id)
        if index is not None:
            return self._workers[index]
        metadata = {"session": session_id}
        if session_id in self._closed:
            raise PagecastError(Reason.SESSION_CLOSED, "the session is closed", metadata=metadata)
        raise PagecastError(Reason.SESSION_NOT_FOUND, "no session has this id", metadata=metadata)

    def closed(self, session_id: str) -> session_pb2.Session | None:
        """Return a closed session as it was left; None if it is not closed or no longer remembered."""
        return self._closed.get(session_id)

    def close(self, session: session_pb2.Session) -> None:
        """Forget where a session is, and remember it as closed, without its labels."""
        self.forget(session.session_id)
        kept = session_pb2.Session()
        kept.CopyFrom(session)
        kept.labels.clear()  # as large as a caller made them
        self._closed[session.session_id] = kept
        while len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)

    def forget(self, session_id: str) -> None:
        """Drop a session that was placed; unknown ids are fine."""
        index = self._index_of.pop(session_id, None)
        if index is not None:
            self._num_sessions[index] -= 1

    def _candidates(self, model: str) -> list[int]:
        """Return the indices of live workers that serve `model`, at least one."""
        serving = [index for index, worker in enumerate(self._workers) if worker.model.name == model]
        if not serving:
            raise PagecastError(
                Reason.MODEL_NOT_FOUND, "no model of this name is served", field="model",
                metadata={"model": model},
            )  # fmt: skip
        live = [index for index in serving if not self._workers[index].lost.is_set()]
        if not live:
            raise PagecastError(Reason.NO_WORKER, "no worker of this model is left")
        return live
