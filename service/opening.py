"""What fills a session's log before its first turn: opening it, and input without a turn.

Knows the worker's calls for both, and how to undo them when their caller leaves.
"""

import asyncio
from contextlib import aclosing, suppress
from functools import partial

import grpc
from google.protobuf.duration_pb2 import Duration

from pagecast.v1 import generation_pb2, session_pb2
from pagecast.worker.v1 import worker_pb2
from service.deadlines import Context, run_deadline
from service.errors import PagecastError, Reason
from service.ids import new_generation_id, new_session_id
from service.outcomes import take_account
from service.pool.link import RECONNECT_S, WorkerLink
from service.router import Router
from service.turns import Turns

# Workers that may die, one after the other, while a session is being opened; each was seen to.
MAX_ATTEMPTS = 4
# A little over the time that a link whose connection broke takes to find its worker lost.
LOST_S = RECONNECT_S + 1.0


async def open_session(
    router: Router[WorkerLink], turns: Turns, request: session_pb2.OpenSessionRequest, context: Context
) -> session_pb2.Session:
    """Open a session and append its initial input; if either fails or the caller leaves, there is none.

    Raises:
        PagecastError: NO_WORKER, or what the worker refused with; the field of what was refused about
            the initial input starts with `initial_input`.
    """
    link, session = await _open_on_any(router, request)
    if request.HasField("initial_input"):
        try:
            deadline = run_deadline(request, context)
            session = await append(
                router, turns, link, session.session_id, request.initial_input, None, deadline
            )
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the input was committed when its caller left
                raise asyncio.CancelledError
        except BaseException as error:
            link.spawn(link.attempt(lambda: _close(link, session.session_id)))
            router.forget(session.session_id)
            if isinstance(error, PagecastError):
                raise _of_initial_input(error) from error
            raise
    router.remember(session)
    return session


async def append(
    router: Router[WorkerLink],
    turns: Turns,
    link: WorkerLink,
    session_id: str,
    content: session_pb2.Input,
    expected_revision: int | None,
    deadline: Duration | None,
) -> session_pb2.Session:
    """Append input, wait until its KV is computed, and read the session.

    A caller who leaves before that cancels it: then nothing was appended. Once it is committed the
    call ends normally, also for a caller who left, so that its answer can be kept for a retry.

    Args:
        router: Told of its end.
        turns: Runs it.
        link: The worker that holds the session.
        session_id: The session.
        content: What is appended.
        expected_revision: Of the session, where the caller names one.
        deadline: Time after which the worker may drop it.

    Raises:
        PagecastError: The input was refused, it failed, or the session was closed meanwhile.
    """
    submit = worker_pb2.SubmitRequest(
        generation_id=new_generation_id(),
        session_id=session_id,
        expected_revision=expected_revision,
        input=content,
        cancel_policy=generation_pb2.CANCEL_POLICY_ROLLBACK,
        deadline=deadline,
        append_only=True,
    )
    turn = turns.start(link, submit)
    take_account(router, link, session_id, turn)
    try:
        async with aclosing(turn.watch()) as events:
            async for _ in events:
                pass
    except asyncio.CancelledError:
        await turn.ended()
        if not turn.is_committed:
            raise
    if not turn.is_committed:
        raise PagecastError(Reason.CANCELLED, "the input was cancelled, nothing was appended")
    reading = link.spawn(link.call(link.stub.GetSession, worker_pb2.GetSessionRequest(session_id=session_id)))
    try:
        response = await asyncio.shield(reading)
    except asyncio.CancelledError:
        response = await reading
    return response.session


async def _open_on_any(
    router: Router[WorkerLink], request: session_pb2.OpenSessionRequest
) -> tuple[WorkerLink, session_pb2.Session]:
    """Open the session on the worker with the fewest, or on another where that one died just now or is full.

    Of workers that are full the last one's refusal is told.
    """
    num_lost = 0
    full: list[WorkerLink] = []
    refusal: PagecastError | None = None
    while num_lost < MAX_ATTEMPTS:
        session_id = new_session_id()
        try:
            link = router.place(session_id, request.model, besides=full)
        except PagecastError as error:
            raise refusal or error from None
        try:
            response = await link.settle(
                link.call(link.stub.OpenSession, _wire(session_id, link.owner_id, request)),
                partial(_close, link, session_id),
            )
        except BaseException as error:
            router.forget(session_id)
            if not isinstance(error, PagecastError):
                raise
            if error.reason is Reason.QUOTA_EXCEEDED:
                full.append(link)
                refusal = error
                continue
            if error.reason is not Reason.WORKER_LOST:
                raise
        else:
            return link, response.session
        if not await _is_lost(link):
            break
        num_lost += 1
    raise PagecastError(Reason.NO_WORKER, "no worker of this model answers")


async def _is_lost(link: WorkerLink) -> bool:
    """Whether the worker whose connection broke is lost: only then no session is placed there any more."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LOST_S):
            await link.lost.wait()
    return link.lost.is_set()


async def _close(link: WorkerLink, session_id: str) -> worker_pb2.CloseSessionResponse:
    return await link.call(link.stub.CloseSession, worker_pb2.CloseSessionRequest(session_id=session_id))


def _wire(
    session_id: str, owner_id: str, request: session_pb2.OpenSessionRequest
) -> worker_pb2.OpenSessionRequest:
    """Return the worker's form of the request."""
    return worker_pb2.OpenSessionRequest(
        session_id=session_id,
        decode_plan=request.decode_plan,
        max_context_tokens=request.max_context_tokens if request.HasField("max_context_tokens") else None,
        default_sampling=request.default_sampling,
        labels=request.labels,
        priority=request.priority,
        owner_id=owner_id,
    )


def _of_initial_input(error: PagecastError) -> PagecastError:
    """Return the error of an append as one of the open that asked for it."""
    if error.status in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
        return error  # nothing about the input
    name = "initial_input"
    if not error.field.startswith("input"):
        return PagecastError(error.reason, error.message, field=name, metadata=error.metadata)
    field = name + error.field.removeprefix("input")
    message = error.message
    if message.startswith(error.field):
        message = field + message.removeprefix(error.field)
    return PagecastError(error.reason, message, field=field, metadata=error.metadata)
