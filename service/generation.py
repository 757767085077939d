"""GenerationService: validate, route, relay a turn's events. Knows no tokenizer and no step."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial

from structlog.typing import FilteringBoundLogger

from pagecast.v1 import generation_pb2, generation_pb2_grpc
from pagecast.worker.v1 import worker_pb2
from service.deadlines import Context, departure, run_deadline
from service.ids import new_generation_id
from service.outcomes import take_account
from service.pool.link import WorkerLink
from service.replays import Replays
from service.router import Router
from service.turns import Turn, Turns
from service.validate import check_cancel_generation, check_generate, not_implemented


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Runs and cancels turns on the workers that hold their sessions."""

    def __init__(
        self, router: Router[WorkerLink], turns: Turns, replays: Replays, log: FilteringBoundLogger
    ) -> None:
        self._router = router
        self._turns = turns
        self._replays = replays
        self._log = log

    def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Run one turn, or watch the one that the same request id started: started, chunks, finished."""
        check_generate(request)
        if request.HasField("request_id"):
            return self._replay(request, context)
        # No generator of its own: every token would pass through it.
        return self._start(request, context).watch(partial(departure, context))

    def AttachGeneration(
        self, request: generation_pb2.AttachGenerationRequest, context: object
    ) -> AsyncIterator[generation_pb2.AttachGenerationResponse]:
        """Refuse: not in this version."""
        raise not_implemented("AttachGeneration")

    async def CancelGeneration(
        self, request: generation_pb2.CancelGenerationRequest, context: object
    ) -> generation_pb2.CancelGenerationResponse:
        """End a turn from outside its stream, which then finishes as CANCELLED."""
        del context
        check_cancel_generation(request)
        return await self._replays.answer("CancelGeneration", request, partial(self._cancel, request))

    def _start(self, request: generation_pb2.GenerateRequest, context: Context) -> Turn:
        link = self._router.find(request.session_id)
        submit, keeps_all = _submit_request(request, context), request.HasField("request_id")
        turn = self._turns.start(link, submit, log=self._log, keeps_all=keeps_all)
        take_account(self._router, link, request.session_id, turn)
        return turn

    async def _replay(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Watch the request's turn, started now or by an earlier call."""
        turn = await self._replays.turn("Generate", request, partial(self._start, request, context))
        async with aclosing(turn.watch(partial(departure, context))) as responses:
            async for response in responses:
                yield response

    async def _cancel(
        self, request: generation_pb2.CancelGenerationRequest
    ) -> generation_pb2.CancelGenerationResponse:
        link = self._router.find(request.session_id)
        wire = worker_pb2.CancelRequest(session_id=request.session_id, generation_id=request.generation_id)
        await link.call(link.stub.Cancel, wire)
        return generation_pb2.CancelGenerationResponse()


def _submit_request(request: generation_pb2.GenerateRequest, context: Context) -> worker_pb2.SubmitRequest:
    """Return the worker's form of the request, under a generation id drawn here."""
    return worker_pb2.SubmitRequest(
        generation_id=new_generation_id(),
        session_id=request.session_id,
        expected_revision=request.expected_revision if request.HasField("expected_revision") else None,
        input=request.input if request.HasField("input") else None,
        sampling=request.sampling,
        stopping=request.stopping,
        response=request.response,
        queue_timeout=request.queue_timeout if request.HasField("queue_timeout") else None,
        time_limit=request.time_limit if request.HasField("time_limit") else None,
        cancel_policy=request.cancel_policy,
        priority=request.priority if request.HasField("priority") else None,
        deadline=run_deadline(request, context),
    )
