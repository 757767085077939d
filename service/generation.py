"""GenerationService: one turn's events from worker to client. Knows no tokenizer and no step.

A stream that ends before its turn did (the client left, its deadline passed, the gateway stops)
cancels the turn in the worker, after Submit's reply, since calls to a worker have no order.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from structlog.typing import FilteringBoundLogger

from pagecast.v1 import generation_pb2, generation_pb2_grpc
from pagecast.worker.v1 import worker_pb2
from service.errors import PagecastError, from_refusal
from service.ids import new_generation_id
from service.pool.link import WorkerLink
from service.router import Router
from service.telemetry.generations import GenerationRecord
from service.validate import check_cancel_generation, check_generate, not_implemented

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Runs and cancels turns on the workers that hold their sessions."""

    def __init__(self, router: Router[WorkerLink], log: FilteringBoundLogger) -> None:
        self._router = router
        self._log = log

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Run one turn: started, chunks, finished."""
        check_generate(request)
        link = self._router.find(request.session_id)
        submit = _submit_request(request)
        record = GenerationRecord(submit.session_id, submit.generation_id)
        status = grpc.StatusCode.INTERNAL
        try:
            async with aclosing(_run_turn(link, submit)) as responses:
                async for response in responses:
                    record.observe(response)
                    yield response
            status = grpc.StatusCode.OK
        except PagecastError as error:
            status = error.status
            raise
        except (asyncio.CancelledError, GeneratorExit):
            status = _departure(context)
            raise
        finally:
            record.log(self._log, status.name)

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
        link = self._router.find(request.session_id)
        wire = worker_pb2.CancelRequest(session_id=request.session_id, generation_id=request.generation_id)
        await link.call(link.stub.Cancel, wire)
        return generation_pb2.CancelGenerationResponse()


async def _run_turn(
    link: WorkerLink, submit: worker_pb2.SubmitRequest
) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
    """Submit a turn and yield its events; if left before the turn is over, cancel it in the worker.

    Raises:
        PagecastError: The turn was refused, it failed, or its worker is lost.
    """
    cancel = worker_pb2.CancelRequest(session_id=submit.session_id, generation_id=submit.generation_id)
    with link.follow(submit.generation_id) as mailbox:
        await link.settle(link.call(link.stub.Submit, submit), lambda: link.call(link.stub.Cancel, cancel))
        is_over = False
        try:
            while not is_over:
                event = await mailbox.take()
                is_over = event.HasField("finished") or event.HasField("failed")
                yield _response(event)
        finally:
            if not is_over:
                link.spawn(link.attempt(link.call(link.stub.Cancel, cancel)))


def _submit_request(request: generation_pb2.GenerateRequest) -> worker_pb2.SubmitRequest:
    """Return the worker's form of the request, under a generation id drawn here."""
    return worker_pb2.SubmitRequest(
        generation_id=new_generation_id(),
        session_id=request.session_id,
        expected_revision=request.expected_revision if request.HasField("expected_revision") else None,
        input=request.input if request.HasField("input") else None,
        sampling=request.sampling,
        stopping=request.stopping,
        response=request.response,
        cancel_policy=request.cancel_policy,
    )


def _response(event: worker_pb2.GenerationEvent) -> generation_pb2.GenerateResponse:
    """Return what the client gets of an event. Raises PagecastError for `failed`."""
    match event.WhichOneof("event"):
        case "started":
            return generation_pb2.GenerateResponse(started=event.started)
        case "chunk":
            return generation_pb2.GenerateResponse(chunk=event.chunk)
        case "finished":
            return generation_pb2.GenerateResponse(finished=event.finished)
        case "failed":
            raise from_refusal(event.failed)
        case _:
            raise ValueError("the worker sent an event without content")


def _departure(context: Context) -> grpc.StatusCode:
    """How a call that was cut off ended for its client."""
    remaining_s = context.time_remaining()
    if remaining_s is not None and remaining_s <= 0:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED
