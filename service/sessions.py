"""SessionService: validate, route, relay. Knows no token and no KV."""

import asyncio
from functools import partial

from pagecast.v1 import session_pb2, session_pb2_grpc
from pagecast.worker.v1 import worker_pb2
from service.ids import new_session_id
from service.pool.link import WorkerLink
from service.router import Router
from service.validate import (
    check_close_session,
    check_get_session,
    check_open_session,
    check_update_session,
    not_implemented,
)


class SessionServicer(session_pb2_grpc.SessionServiceServicer):
    """Opens, reads, changes and closes sessions on the workers that hold them."""

    def __init__(self, router: Router[WorkerLink]) -> None:
        self._router = router
        self._closing: dict[str, asyncio.Task[session_pb2.Session]] = {}

    async def OpenSession(
        self, request: session_pb2.OpenSessionRequest, context: object
    ) -> session_pb2.OpenSessionResponse:
        """Open a session on the worker with the fewest; a caller who left meanwhile leaves none behind."""
        del context
        check_open_session(request)
        session_id = new_session_id()
        link = self._router.place(session_id, request.model)
        wire = worker_pb2.OpenSessionRequest(
            session_id=session_id,
            decode_plan=request.decode_plan,
            max_context_tokens=request.max_context_tokens if request.HasField("max_context_tokens") else None,
            default_sampling=request.default_sampling,
            labels=request.labels,
        )
        try:
            response = await link.settle(
                link.call(link.stub.OpenSession, wire), lambda: self._close_in_worker(link, session_id)
            )
        except BaseException:
            self._router.forget(session_id)
            raise
        return session_pb2.OpenSessionResponse(session=response.session)

    async def GetSession(
        self, request: session_pb2.GetSessionRequest, context: object
    ) -> session_pb2.GetSessionResponse:
        """Read a session; one that was closed reads as it was left."""
        del context
        check_get_session(request)
        closed = self._router.closed(request.session_id)
        if closed is not None:
            return session_pb2.GetSessionResponse(session=closed)
        link = self._router.find(request.session_id)
        wire = worker_pb2.GetSessionRequest(session_id=request.session_id)
        response = await link.call(link.stub.GetSession, wire)
        return session_pb2.GetSessionResponse(session=response.session)

    async def UpdateSession(
        self, request: session_pb2.UpdateSessionRequest, context: object
    ) -> session_pb2.UpdateSessionResponse:
        """Change plan mode and labels, also in the middle of a generation."""
        del context
        check_update_session(request)
        link = self._router.find(request.session_id)
        wire = worker_pb2.UpdateSessionRequest(
            session_id=request.session_id,
            expected_revision=request.expected_revision if request.HasField("expected_revision") else None,
            decode_plan=request.decode_plan,
            labels=request.labels,
        )
        response = await link.call(link.stub.UpdateSession, wire)
        return session_pb2.UpdateSessionResponse(session=response.session)

    async def CloseSession(
        self, request: session_pb2.CloseSessionRequest, context: object
    ) -> session_pb2.CloseSessionResponse:
        """Close a session; closing it again answers the same."""
        del context
        check_close_session(request)
        session = self._router.closed(request.session_id)
        if session is None:
            session = await self._close(request.session_id)
        return session_pb2.CloseSessionResponse(session=session)

    async def _close(self, session_id: str) -> session_pb2.Session:
        """Close a session once, whoever asks meanwhile, and to the end, also if all of them leave."""
        task = self._closing.get(session_id)
        if task is None:
            link = self._router.find(session_id)
            task = self._closing[session_id] = link.spawn(self._close_and_remember(link, session_id))
            task.add_done_callback(partial(self._forget_close, session_id))
        return await asyncio.shield(task)

    def _forget_close(self, session_id: str, task: asyncio.Task[session_pb2.Session]) -> None:
        del self._closing[session_id]
        if not task.cancelled():
            task.exception()  # read, so that a failure that nobody waits for any more is no error

    async def _close_and_remember(self, link: WorkerLink, session_id: str) -> session_pb2.Session:
        response = await self._close_in_worker(link, session_id)
        self._router.close(response.session)
        return response.session

    async def _close_in_worker(self, link: WorkerLink, session_id: str) -> worker_pb2.CloseSessionResponse:
        return await link.call(link.stub.CloseSession, worker_pb2.CloseSessionRequest(session_id=session_id))

    async def ListSessions(
        self, request: session_pb2.ListSessionsRequest, context: object
    ) -> session_pb2.ListSessionsResponse:
        """Refuse: not in this version."""
        raise not_implemented("ListSessions")

    async def AppendInput(
        self, request: session_pb2.AppendInputRequest, context: object
    ) -> session_pb2.AppendInputResponse:
        """Refuse: not in this version."""
        raise not_implemented("AppendInput")

    async def ForkSession(
        self, request: session_pb2.ForkSessionRequest, context: object
    ) -> session_pb2.ForkSessionResponse:
        """Refuse: not in this version."""
        raise not_implemented("ForkSession")

    async def TruncateSession(
        self, request: session_pb2.TruncateSessionRequest, context: object
    ) -> session_pb2.TruncateSessionResponse:
        """Refuse: not in this version."""
        raise not_implemented("TruncateSession")

    async def SuspendSession(
        self, request: session_pb2.SuspendSessionRequest, context: object
    ) -> session_pb2.SuspendSessionResponse:
        """Refuse: not in this version."""
        raise not_implemented("SuspendSession")

    async def ResumeSession(
        self, request: session_pb2.ResumeSessionRequest, context: object
    ) -> session_pb2.ResumeSessionResponse:
        """Refuse: not in this version."""
        raise not_implemented("ResumeSession")
