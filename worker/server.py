"""WorkerService over an engine: one short method per RPC, and the reports that leave, numbered.

Runs on the asyncio thread. Tokenising happens here, in a helper thread, so that a long
input never stalls the engine's steps.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from pagecast.v1 import model_pb2, session_pb2
from pagecast.worker.v1 import worker_pb2, worker_pb2_grpc
from worker import commands, requests
from worker.batch import Failed, Finished, StepReport, TokenDrawn
from worker.commands import SessionView
from worker.engine import Engine
from worker.errors import Refused
from worker.intake import Intake
from worker.owners import OwnerGone, Owners
from worker.reports import ReportRing
from worker.wire import put_event, put_token, refusal_to_wire, sampling_to_wire, session_to_wire

ServerContext = grpc.aio.ServicerContext[Any, Any]
Result = TypeVar("Result")

# A session can move on while an input is tokenised only when turns of one session race; each
# retry means that another turn was committed in between.
_MAX_STALE_RETRIES = 8
# Inputs tokenised, or ids decoded, at once: bounds the memory that long ones take, and leaves the cores
# to the steps.
_MAX_TOKENISING = 2


@dataclass(frozen=True, slots=True)
class _Stream:
    """How a running turn's events are put on the wire."""

    sampling: session_pb2.SamplingParams
    input_token_ids: tuple[int, ...]
    with_timing: bool


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """The servicer of one worker process.

    Args:
        engine: Started by the caller, which hands its reports to `deliver`.
        intake: Input to token ids.
        model: What this worker serves.
        version: Of the Pagecast distribution.
        num_kv_blocks: Size of the pool.
        log_tokens: Writes the events of a step's tokens to the log; called on the asyncio thread.
        log_gone: Writes that a gateway is gone and how many sessions were closed with it; called there too.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        intake: Intake,
        model: model_pb2.Model,
        version: str,
        num_kv_blocks: int,
        log_tokens: Callable[[Sequence[TokenDrawn]], None],
        log_gone: Callable[[int], None],
    ) -> None:
        self._engine = engine
        self._intake = intake
        self._model = model
        self._version = version
        self._num_kv_blocks = num_kv_blocks
        self._log_tokens = log_tokens
        self._instance_id = secrets.token_hex(8)
        self._streams: dict[str, _Stream] = {}
        self._owners = Owners(lambda session_id: self._do(commands.CloseSession(session_id)), log_gone)
        self._background: set[asyncio.Task[Any]] = set()
        self._tokenising = asyncio.Semaphore(_MAX_TOKENISING)
        self._ring = ReportRing()

    def deliver(self, report: StepReport) -> None:
        """Number a report and hand it to every reader. Called on the asyncio thread."""
        wire = worker_pb2.StreamStepsResponse()
        drawn = []
        for event in report.events:
            stream = self._streams.get(event.generation_id)
            if stream is None:
                continue
            if isinstance(event, TokenDrawn):
                drawn.append(event)
                put_token(wire, event, with_timing=stream.with_timing)
                continue
            if isinstance(event, Finished | Failed):
                del self._streams[event.generation_id]
            put_event(wire, event, sampling=stream.sampling, input_token_ids=stream.input_token_ids)
        if wire.events:
            self._ring.append(wire)
        if drawn:  # behind the readers that were woken: nobody waits for the log
            asyncio.get_running_loop().call_soon(self._log_tokens, drawn)

    def close(self) -> None:
        """End the readers' streams once they have every report."""
        self._ring.close()

    async def GetWorkerInfo(
        self, request: worker_pb2.GetWorkerInfoRequest, context: ServerContext
    ) -> worker_pb2.GetWorkerInfoResponse:
        """Who this worker is and how full."""
        return worker_pb2.GetWorkerInfoResponse(
            version=self._version,
            instance_id=self._instance_id,
            model=self._model,
            num_kv_blocks=self._num_kv_blocks,
            num_free_kv_blocks=self._engine.num_free_blocks,
            num_steps=self._engine.num_steps,
            running_step_ns=self._engine.running_step_ns,
        )

    async def OpenSession(
        self, request: worker_pb2.OpenSessionRequest, context: ServerContext
    ) -> worker_pb2.OpenSessionResponse:
        """Opens an empty session; goes on when the call is cancelled, so that it has its owner."""
        try:
            view = await self._to_its_end(self._open(request))
        except Refused as refused:
            return worker_pb2.OpenSessionResponse(refusal=refusal_to_wire(refused))
        return worker_pb2.OpenSessionResponse(session=self._session(view))

    async def GetSession(
        self, request: worker_pb2.GetSessionRequest, context: ServerContext
    ) -> worker_pb2.GetSessionResponse:
        """Reads a session between two steps."""
        try:
            view = await self._do(commands.GetSession(request.session_id))
        except Refused as refused:
            return worker_pb2.GetSessionResponse(refusal=refusal_to_wire(refused))
        return worker_pb2.GetSessionResponse(session=self._session(view))

    async def BatchGetSessions(
        self, request: worker_pb2.BatchGetSessionsRequest, context: ServerContext
    ) -> worker_pb2.BatchGetSessionsResponse:
        """Reads several sessions, in the order asked; those that are not open are left out."""
        reads = [self._do(commands.GetSession(session_id)) for session_id in request.session_ids]
        answers = await asyncio.gather(*reads, return_exceptions=True)
        sessions = []
        for answer in answers:
            if isinstance(answer, SessionView):
                sessions.append(self._session(answer))
            elif not isinstance(answer, Refused):
                raise answer
        return worker_pb2.BatchGetSessionsResponse(sessions=sessions)

    async def UpdateSession(
        self, request: worker_pb2.UpdateSessionRequest, context: ServerContext
    ) -> worker_pb2.UpdateSessionResponse:
        """Sets plan mode, priority and labels, also in the middle of a turn."""
        try:
            view = await self._do(requests.update_session(request))
        except Refused as refused:
            return worker_pb2.UpdateSessionResponse(refusal=refusal_to_wire(refused))
        return worker_pb2.UpdateSessionResponse(session=self._session(view))

    async def CloseSession(
        self, request: worker_pb2.CloseSessionRequest, context: ServerContext
    ) -> worker_pb2.CloseSessionResponse:
        """Cancels a running turn and frees everything."""
        try:
            view = await self._do(commands.CloseSession(request.session_id))
        except Refused as refused:
            return worker_pb2.CloseSessionResponse(refusal=refusal_to_wire(refused))
        self._owners.closed(request.session_id)
        session = self._session(view)
        session.state = session_pb2.SESSION_STATE_CLOSED
        return worker_pb2.CloseSessionResponse(session=session)

    async def Submit(
        self, request: worker_pb2.SubmitRequest, context: ServerContext
    ) -> worker_pb2.SubmitResponse:
        """Starts a turn; its events come on StreamSteps.

        Goes on when the call is cancelled, so that the Cancel that follows finds what it ends.
        """
        try:
            accepted = await self._to_its_end(self._submit(request, received_ns=time.monotonic_ns()))
        except Refused as refused:
            return worker_pb2.SubmitResponse(refusal=refusal_to_wire(refused))
        return worker_pb2.SubmitResponse(accepted=accepted)

    async def Cancel(
        self, request: worker_pb2.CancelRequest, context: ServerContext
    ) -> worker_pb2.CancelResponse:
        """Ends a turn by its policy; the turn's last event tells that it is over."""
        try:
            await self._do(commands.Cancel(request.session_id, request.generation_id))
        except Refused as refused:
            return worker_pb2.CancelResponse(refusal=refusal_to_wire(refused))
        return worker_pb2.CancelResponse()

    async def Tokenize(
        self, request: worker_pb2.TokenizeRequest, context: ServerContext
    ) -> worker_pb2.TokenizeResponse:
        """The ids that a fresh session's log would hold after this input."""
        try:
            if not request.HasField("input"):
                raise Refused("FIELD_REQUIRED", "there is nothing to tokenise", field="input")
            async with self._tokenising:
                ids = await asyncio.to_thread(
                    self._intake.tokenize, request.input, max_tokens=self._model.max_context_tokens
                )
        except Refused as refused:
            return worker_pb2.TokenizeResponse(refusal=refusal_to_wire(refused))
        return worker_pb2.TokenizeResponse(token_ids=ids)

    async def Detokenize(
        self, request: worker_pb2.DetokenizeRequest, context: ServerContext
    ) -> worker_pb2.DetokenizeResponse:
        """The text of ids, without special tokens."""
        try:
            async with self._tokenising:
                text = await asyncio.to_thread(
                    self._intake.detokenize, request.token_ids, max_tokens=self._model.max_context_tokens
                )
        except Refused as refused:
            return worker_pb2.DetokenizeResponse(refusal=refusal_to_wire(refused))
        return worker_pb2.DetokenizeResponse(text=text)

    async def StreamSteps(
        self, request: worker_pb2.StreamStepsRequest, context: ServerContext
    ) -> AsyncIterator[worker_pb2.StreamStepsResponse]:
        """Every report after the one that the reader has; OUT_OF_RANGE if that one's next is gone."""
        try:
            with self._owners.reading(request.owner_id):
                async for report in self._ring.follow(request.after_report):
                    yield report
        except LookupError as error:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, str(error))
        except OwnerGone as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def _do(self, command: commands.Command) -> SessionView:
        return await asyncio.wrap_future(self._engine.post(command))

    async def _open(self, request: worker_pb2.OpenSessionRequest) -> SessionView:
        view = await self._do(requests.open_session(request, self._intake))
        self._owners.opened(request.owner_id, request.session_id)
        return view

    async def _submit(
        self, request: worker_pb2.SubmitRequest, *, received_ns: int
    ) -> worker_pb2.SubmitAccepted:
        generation_id = request.generation_id
        self._check_is_new(generation_id)
        for _ in range(_MAX_STALE_RETRIES):
            base = self._engine.turn_base(request.session_id)
            async with self._tokenising:
                command = await asyncio.to_thread(
                    requests.submit, request, base, self._intake, received_ns=received_ns
                )
            # Again: another call of the same id may have come this far meanwhile.
            self._check_is_new(generation_id)
            sampling = sampling_to_wire(command.sampling)
            # Known before the engine is: the turn's first events may come before the engine's answer.
            self._streams[generation_id] = _Stream(
                sampling=sampling,
                input_token_ids=command.input_ids if request.response.input_token_ids else (),
                with_timing=request.response.token_timing,
            )
            try:
                await self._do(command)
            except Exception as error:
                del self._streams[generation_id]
                if not (isinstance(error, Refused) and error.reason == "STALE_BASE"):
                    raise
            else:
                return worker_pb2.SubmitAccepted(input_token_ids=command.input_ids, sampling=sampling)
        raise Refused("SESSION_BUSY", "other turns of this session kept coming first")

    def _check_is_new(self, generation_id: str) -> None:
        if not generation_id or generation_id in self._streams:
            raise Refused("FIELD_INVALID", "a generation id is new and not empty", field="generation_id")

    async def _to_its_end(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`, which goes on when the caller is cancelled."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()  # read, so that a refusal that nobody waits for any more is no error

    def _session(self, view: SessionView) -> session_pb2.Session:
        return session_to_wire(view, model=self._model.name, fingerprint=self._model.numerics_fingerprint)
