"""SessionService: validate, route, relay. Knows no token and no KV."""

from functools import partial

from pagecast.v1 import session_pb2, session_pb2_grpc
from pagecast.worker.v1 import worker_pb2
from service.closing import Closings
from service.deadlines import Context, run_deadline
from service.errors import PagecastError, Reason
from service.listing import SessionPages
from service.opening import append, open_session
from service.pool.link import WorkerLink
from service.replays import Replays
from service.router import Router
from service.turns import Turns
from service.validate import (
    check_append_input,
    check_close_session,
    check_get_session,
    check_list_sessions,
    check_open_session,
    check_update_session,
    not_implemented,
)
from service.validate.limits import DEFAULT_PAGE_SIZE


class SessionServicer(session_pb2_grpc.SessionServiceServicer):
    """Opens, reads, changes and closes sessions on the workers that hold them."""

    def __init__(self, router: Router[WorkerLink], turns: Turns, replays: Replays) -> None:
        self._router = router
        self._turns = turns
        self._replays = replays
        self._closings = Closings(router)
        self._pages = SessionPages(router)

    async def OpenSession(
        self, request: session_pb2.OpenSessionRequest, context: Context
    ) -> session_pb2.OpenSessionResponse:
        """Open a session on the worker with the fewest; a caller who left meanwhile leaves none behind."""
        check_open_session(request)

        async def run() -> session_pb2.OpenSessionResponse:
            session = await open_session(self._router, self._turns, request, context)
            return session_pb2.OpenSessionResponse(session=session)

        return await self._replays.answer("OpenSession", request, run, is_undone_when_left=True)

    async def GetSession(
        self, request: session_pb2.GetSessionRequest, context: object
    ) -> session_pb2.GetSessionResponse:
        """Read a session; one that was closed, or whose worker is lost, reads as it was left."""
        del context
        check_get_session(request)
        session_id = request.session_id
        session = self._router.closed(session_id) or self._router.failed(session_id)
        if session is None:
            session = await self._get(session_id)
        return session_pb2.GetSessionResponse(session=session)

    async def ListSessions(
        self, request: session_pb2.ListSessionsRequest, context: object
    ) -> session_pb2.ListSessionsResponse:
        """List sessions that are open or failed, newest first."""
        del context
        check_list_sessions(request)
        size = request.page_size if request.HasField("page_size") else DEFAULT_PAGE_SIZE
        sessions, token = await self._pages.read(size, request.page_token)
        return session_pb2.ListSessionsResponse(sessions=sessions, next_page_token=token)

    async def UpdateSession(
        self, request: session_pb2.UpdateSessionRequest, context: object
    ) -> session_pb2.UpdateSessionResponse:
        """Change plan mode, priority and labels, also in the middle of a generation."""
        del context
        check_update_session(request)
        return await self._replays.answer("UpdateSession", request, partial(self._update, request))

    async def AppendInput(
        self, request: session_pb2.AppendInputRequest, context: Context
    ) -> session_pb2.AppendInputResponse:
        """Append input and wait for its KV; a caller who left before that has appended nothing."""
        check_append_input(request)

        async def run() -> session_pb2.AppendInputResponse:
            link = self._router.find(request.session_id)
            revision = request.expected_revision if request.HasField("expected_revision") else None
            deadline = run_deadline(request, context)
            session = await append(
                self._router, self._turns, link, request.session_id, request.input, revision, deadline
            )
            self._router.remember(session)
            return session_pb2.AppendInputResponse(session=session)

        return await self._replays.answer("AppendInput", request, run, is_undone_when_left=True)

    async def CloseSession(
        self, request: session_pb2.CloseSessionRequest, context: object
    ) -> session_pb2.CloseSessionResponse:
        """Close a session; closing it again answers the same."""
        del context
        check_close_session(request)

        async def run() -> session_pb2.CloseSessionResponse:
            return session_pb2.CloseSessionResponse(session=await self._closings.close(request.session_id))

        return await self._replays.answer("CloseSession", request, run)

    async def _get(self, session_id: str) -> session_pb2.Session:
        link = self._router.find(session_id)
        try:
            response = await link.call(
                link.stub.GetSession, worker_pb2.GetSessionRequest(session_id=session_id)
            )
        except PagecastError as error:
            if error.reason is not Reason.WORKER_LOST:
                raise
            left = self._router.closed(session_id) or self._router.failed(session_id)
            if left is None:
                raise
            return left
        self._router.remember(response.session)
        return response.session

    async def _update(self, request: session_pb2.UpdateSessionRequest) -> session_pb2.UpdateSessionResponse:
        link = self._router.find(request.session_id)
        wire = worker_pb2.UpdateSessionRequest(
            session_id=request.session_id,
            expected_revision=request.expected_revision if request.HasField("expected_revision") else None,
            decode_plan=request.decode_plan,
            labels=request.labels,
            priority=request.priority if request.HasField("priority") else None,
        )
        response = await link.call(link.stub.UpdateSession, wire)
        self._router.remember(response.session)
        return session_pb2.UpdateSessionResponse(session=response.session)

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
