"""A test double of a worker: speaks the worker protocol over a Unix socket, does what a test says."""
# ruff: noqa: N802  methods carry the names of their RPCs

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import grpc

from pagecast.v1 import generation_pb2, model_pb2, session_pb2
from pagecast.worker.v1 import worker_pb2, worker_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Keeps sessions in a dict and emits the events that a test hands it.

    Takes calls with any token or none. Input that is only to be appended has its KV as soon as
    `append_gate` is open. A turn that nothing was emitted for is dropped with DEADLINE_EXCEEDED
    once its deadline has passed, if `drops_late` is set.

    Attributes:
        refusals: Answer of a method by its name, instead of what it would do.
        submit_gate: Submit waits for it before it answers.
        open_gate: OpenSession waits for it before it answers.
        append_gate: The end of an append waits for it.
        batch_gate: BatchGetSessions waits for it before it answers.
        calls: Names of the calls on sessions, in their order.
        owners: Owner of each session that was opened, by its id.
        num_readers: StreamSteps calls that are open.
        is_owner_gone: Whether StreamSteps refuses as for an owner whose sessions were closed.
    """

    def __init__(self, folder: Path, *, name: str = "tiny", version: str = "0.1.0") -> None:
        self.address = f"unix:{folder / f'{name}-{id(self)}.sock'}"
        self.info = worker_pb2.GetWorkerInfoResponse(
            version=version,
            instance_id=f"instance-{id(self)}",
            model=model_pb2.Model(name=name, vocab_size=32, block_size=16),
        )
        self.sessions: dict[str, session_pb2.Session] = {}
        self.submits: dict[str, worker_pb2.SubmitRequest] = {}
        self.cancels: list[str] = []
        self.refusals: dict[str, worker_pb2.Refusal] = {}
        self.submit_gate = asyncio.Event()
        self.submit_gate.set()
        self.open_gate = asyncio.Event()
        self.open_gate.set()
        self.append_gate = asyncio.Event()
        self.append_gate.set()
        self.batch_gate = asyncio.Event()
        self.batch_gate.set()
        self.drops_late = False
        self.calls: list[str] = []
        self.owners: dict[str, str] = {}
        self.num_readers = 0
        self.is_owner_gone = False
        self.first_kept = 1
        self._reports: list[worker_pb2.StreamStepsResponse] = []
        self._news = asyncio.Condition()
        self._cut = 0
        self._begun: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._server = grpc.aio.server()

    async def start(self) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def die(self) -> None:
        for task in self._background:
            task.cancel()
        await self._server.stop(None)

    async def emit(self, generation_id: str, **event: Any) -> None:
        """Report one event: `started=`, `chunk=`, `finished=` or `failed=`."""
        self._begun.add(generation_id)
        number = len(self._reports) + 1
        events = [worker_pb2.GenerationEvent(generation_id=generation_id, **event)]
        self._reports.append(worker_pb2.StreamStepsResponse(report=number, events=events))
        async with self._news:
            self._news.notify_all()

    async def emit_token(self, generation_id: str, index: int, text: str = "x") -> None:
        chunk = generation_pb2.TokenChunk(
            first_token_index=index,
            tokens=[generation_pb2.Token(id=index)],
            text_delta=text,
            usage=generation_pb2.Usage(input_tokens=3, output_tokens=index + 1),
        )
        await self.emit(generation_id, chunk=chunk)

    async def emit_finish(
        self,
        generation_id: str,
        reason: generation_pb2.FinishReason = generation_pb2.FINISH_REASON_EOS,
        *,
        revision: int = 1,
        num_tokens: int = 5,
        is_late: bool = False,
    ) -> None:
        finished = generation_pb2.GenerationFinished(
            finish_reason=reason,
            revision=revision,
            usage=generation_pb2.Usage(input_tokens=3, cached_tokens=2, output_tokens=2),
            plan_stats=session_pb2.PlanStats(builds=1, reuses=4),
        )
        await self.emit(generation_id, finished=finished, is_late=is_late, num_tokens=num_tokens)

    async def cut_streams(self) -> None:
        """End every StreamSteps call with UNAVAILABLE, as a broken connection would."""
        self._cut += 1
        async with self._news:
            self._news.notify_all()

    async def GetWorkerInfo(self, request: Any, context: Context) -> worker_pb2.GetWorkerInfoResponse:
        return self.info

    async def OpenSession(
        self, request: worker_pb2.OpenSessionRequest, context: Context
    ) -> worker_pb2.OpenSessionResponse:
        self.calls.append("OpenSession")
        await self.open_gate.wait()
        if "OpenSession" in self.refusals:
            return worker_pb2.OpenSessionResponse(refusal=self.refusals["OpenSession"])
        session = session_pb2.Session(
            session_id=request.session_id,
            model=self.info.model.name,
            state=session_pb2.SESSION_STATE_ACTIVE,
            decode_plan=request.decode_plan or session_pb2.PAGED_DECODE_PLAN_PLAN_ONCE,
            max_context_tokens=request.max_context_tokens,
            labels=request.labels,
            priority=request.priority,
        )
        self.sessions[request.session_id] = session
        self.owners[request.session_id] = request.owner_id
        return worker_pb2.OpenSessionResponse(session=session)

    async def GetSession(
        self, request: worker_pb2.GetSessionRequest, context: Context
    ) -> worker_pb2.GetSessionResponse:
        self.calls.append("GetSession")
        session = self.sessions.get(request.session_id)
        if session is None:
            return worker_pb2.GetSessionResponse(refusal=_no_session())
        return worker_pb2.GetSessionResponse(session=session)

    async def BatchGetSessions(
        self, request: worker_pb2.BatchGetSessionsRequest, context: Context
    ) -> worker_pb2.BatchGetSessionsResponse:
        self.calls.append("BatchGetSessions")
        await self.batch_gate.wait()
        found = [self.sessions[each] for each in request.session_ids if each in self.sessions]
        return worker_pb2.BatchGetSessionsResponse(sessions=found)

    async def UpdateSession(
        self, request: worker_pb2.UpdateSessionRequest, context: Context
    ) -> worker_pb2.UpdateSessionResponse:
        self.calls.append("UpdateSession")
        if "UpdateSession" in self.refusals:
            return worker_pb2.UpdateSessionResponse(refusal=self.refusals["UpdateSession"])
        session = self.sessions[request.session_id]
        if request.HasField("priority"):
            session.priority = request.priority
        if request.decode_plan:
            session.decode_plan = request.decode_plan
        session.labels.update(request.labels)
        return worker_pb2.UpdateSessionResponse(session=session)

    async def CloseSession(
        self, request: worker_pb2.CloseSessionRequest, context: Context
    ) -> worker_pb2.CloseSessionResponse:
        self.calls.append("CloseSession")
        session = self.sessions.pop(request.session_id, None)
        if session is None:
            return worker_pb2.CloseSessionResponse(refusal=_no_session())
        session.state = session_pb2.SESSION_STATE_CLOSED
        return worker_pb2.CloseSessionResponse(session=session)

    async def Submit(self, request: worker_pb2.SubmitRequest, context: Context) -> worker_pb2.SubmitResponse:
        self.submits[request.generation_id] = request
        await self.submit_gate.wait()
        if "Submit" in self.refusals:
            return worker_pb2.SubmitResponse(refusal=self.refusals["Submit"])
        if request.append_only:
            self._spawn(self._append(request))
        elif self.drops_late and request.HasField("deadline"):
            self._spawn(self._drop_late(request))
        return worker_pb2.SubmitResponse(accepted=worker_pb2.SubmitAccepted(input_token_ids=[1, 2, 3]))

    async def Cancel(self, request: worker_pb2.CancelRequest, context: Context) -> worker_pb2.CancelResponse:
        self.cancels.append(request.generation_id)
        if "Cancel" in self.refusals:
            return worker_pb2.CancelResponse(refusal=self.refusals["Cancel"])
        await self.emit_finish(request.generation_id, generation_pb2.FINISH_REASON_CANCELLED)
        return worker_pb2.CancelResponse()

    async def Tokenize(
        self, request: worker_pb2.TokenizeRequest, context: Context
    ) -> worker_pb2.TokenizeResponse:
        """One token a byte, by its value."""
        if "Tokenize" in self.refusals:
            return worker_pb2.TokenizeResponse(refusal=self.refusals["Tokenize"])
        return worker_pb2.TokenizeResponse(token_ids=request.input.text.encode())

    async def Detokenize(
        self, request: worker_pb2.DetokenizeRequest, context: Context
    ) -> worker_pb2.DetokenizeResponse:
        if "Detokenize" in self.refusals:
            return worker_pb2.DetokenizeResponse(refusal=self.refusals["Detokenize"])
        return worker_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _append(self, request: worker_pb2.SubmitRequest) -> None:
        await self.emit(request.generation_id, started=generation_pb2.GenerationStarted())
        await self.append_gate.wait()
        session = self.sessions.get(request.session_id)
        if session is None or request.generation_id in self.cancels:
            return
        session.revision += 1
        session.num_tokens += len(request.input.text)
        finished = generation_pb2.GenerationFinished(revision=session.revision)
        await self.emit(request.generation_id, finished=finished, num_tokens=session.num_tokens)

    async def _drop_late(self, request: worker_pb2.SubmitRequest) -> None:
        await asyncio.sleep(request.deadline.ToNanoseconds() / 1e9)
        if request.generation_id not in self._begun:
            late = worker_pb2.Refusal(reason="DEADLINE_EXCEEDED", message="nobody waits for it any more")
            await self.emit(request.generation_id, failed=late)

    async def StreamSteps(
        self, request: worker_pb2.StreamStepsRequest, context: Context
    ) -> AsyncIterator[worker_pb2.StreamStepsResponse]:
        if self.is_owner_gone:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "gone")
        self.num_readers += 1
        cut, last = self._cut, request.after_report or self.first_kept - 1
        try:
            while self._cut == cut:
                if last + 1 < self.first_kept:
                    await context.abort(grpc.StatusCode.OUT_OF_RANGE, "not kept")
                for report in self._reports[last:]:
                    yield report
                    last = report.report
                async with self._news:
                    if len(self._reports) == last and self._cut == cut:
                        await self._news.wait()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        finally:
            self.num_readers -= 1


def _no_session() -> worker_pb2.Refusal:
    return worker_pb2.Refusal(reason="SESSION_NOT_FOUND", message="no session has this id")
