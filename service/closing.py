"""Closing sessions: once each, to the end, also where the worker is lost. Knows no request."""

import asyncio
from functools import partial

from pagecast.v1 import session_pb2
from pagecast.worker.v1 import worker_pb2
from service.errors import PagecastError, Reason
from service.pool.link import WorkerLink
from service.router import Router


class Closings:
    """The closes that run in this gateway."""

    def __init__(self, router: Router[WorkerLink]) -> None:
        self._router = router
        self._running: dict[str, asyncio.Task[session_pb2.Session]] = {}

    async def close(self, session_id: str) -> session_pb2.Session:
        """Close a session once, whoever asks meanwhile, and to the end, also if all of them leave.

        Returns:
            The session as it was left, CLOSED; the same again for one that is closed.

        Raises:
            PagecastError: SESSION_NOT_FOUND, or the worker does not answer.
        """
        closed = self._router.closed(session_id) or self._close_failed(session_id)
        if closed is not None:
            return closed
        task = self._running.get(session_id)
        if task is None:
            link = self._router.find(session_id)
            task = self._running[session_id] = link.spawn(self._close(link, session_id))
            task.add_done_callback(partial(self._forget, session_id))
        return await asyncio.shield(task)

    async def _close(self, link: WorkerLink, session_id: str) -> session_pb2.Session:
        try:
            response = await link.call(
                link.stub.CloseSession, worker_pb2.CloseSessionRequest(session_id=session_id)
            )
        except PagecastError as error:
            closed = self._close_failed(session_id) if error.reason is Reason.WORKER_LOST else None
            if closed is None:
                raise
            return closed
        self._router.close(response.session)
        return response.session

    def _close_failed(self, session_id: str) -> session_pb2.Session | None:
        """Close a session whose worker is lost: there is nothing left to free. None if it is no such one."""
        failed = self._router.failed(session_id)
        if failed is None:
            return None
        closed = session_pb2.Session()
        closed.CopyFrom(failed)
        closed.state = session_pb2.SESSION_STATE_CLOSED
        self._router.close(closed)
        return closed

    def _forget(self, session_id: str, task: asyncio.Task[session_pb2.Session]) -> None:
        del self._running[session_id]
        if not task.cancelled():
            task.exception()  # read, so that a failure that nobody waits for any more is no error
