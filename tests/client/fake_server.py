"""A small server of the three public services over loopback, for tests of clients.

It answers a turn with the turn's own text, one token per character (its code point), so that a
test knows every id. It can be told to refuse, to be slow, to hold back or to send a script. A turn
ends before the first of its stop sequences, and the logprob of a token is minus its index.
"""

import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pagecast.v1 import generation_pb2 as generation
from pagecast.v1 import generation_pb2_grpc, model_pb2_grpc, session_pb2_grpc
from pagecast.v1 import model_pb2 as model
from pagecast.v1 import session_pb2 as session


@dataclasses.dataclass
class Refusal:
    """A status with the details that the public API promises; `reason` empty: a bare status."""

    code: grpc.StatusCode
    reason: str = ""
    message: str = "refused by the test"
    field: str = ""
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)

    def abort(self, context: grpc.ServicerContext) -> None:
        details = []
        if self.reason:
            info = error_details_pb2.ErrorInfo(reason=self.reason, domain="pagecast", metadata=self.metadata)
            details.append(info)
        if self.field:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.field)
            details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        packed = [any_pb2.Any() for _ in details]
        for target, detail in zip(packed, details, strict=True):
            target.Pack(detail)
        status = status_pb2.Status(code=self.code.value[0], message=self.message, details=packed)
        context.abort_with_status(rpc_status.to_status(status))


class FakeServer(
    session_pb2_grpc.SessionServiceServicer,
    generation_pb2_grpc.GenerationServiceServicer,
    model_pb2_grpc.ModelServiceServicer,
):
    """The server; `target` is its address while it is entered."""

    def __init__(self) -> None:
        self.models = ["tiny"]
        self.requests: list[Any] = []
        self.refusals: dict[str, Refusal] = {}  # by RPC name
        self.delays_s: dict[str, float] = {}  # so too
        self.script: list[generation.GenerateResponse] | None = None
        self.sampling = session.SamplingParams(temperature=0.0, seed=7)
        self.hold_after: int | None = None  # tokens, then wait for a cancel from either side
        self.fail_after: int | None = None  # tokens, then `failure`, and a lost worker's session is FAILED
        self.failure = Refusal(grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
        self.end_reason: int | None = None  # of turns that end by themselves
        self.ignores_cancels = False
        self.rolls_back = False  # a turn that is left, whatever its cancel policy
        self.default_page_size = 100
        self.control_ids: set[int] = set()  # that spell nothing
        self.first_token_delay_s = 0.0
        self.ended = threading.Event()  # no Generate is in its handler any more
        self._running = 0
        self._running_lock = threading.Lock()
        self.log: dict[str, list[int]] = {}
        self.state: dict[str, session.Session] = {}
        self._cancels: dict[str, threading.Event] = {}
        self._server = grpc.server(ThreadPoolExecutor(8))
        session_pb2_grpc.add_SessionServiceServicer_to_server(self, self._server)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, self._server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(self, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.stop(grace=None).wait(5)

    def last(self, kind: type[Any]) -> Any:
        """The last request of a type."""
        return next(request for request in reversed(self.requests) if isinstance(request, kind))

    def _note(self, name: str, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        time.sleep(self.delays_s.get(name, 0.0))
        if name in self.refusals:
            self.refusals[name].abort(context)
        session_id = getattr(request, "session_id", "")
        if session_id and session_id not in self.state:
            Refusal(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND").abort(context)
        failed = session_id and self.state[session_id].state == session.SESSION_STATE_FAILED
        if failed and name not in {"GetSession", "CloseSession"}:
            Refusal(grpc.StatusCode.FAILED_PRECONDITION, "SESSION_FAILED", "its worker is gone").abort(
                context
            )

    def _check_model(self, name: str, context: grpc.ServicerContext) -> None:
        if name not in self.models:
            Refusal(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", metadata={"model": name}).abort(context)

    def OpenSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note("OpenSession", request, context)
        self._check_model(request.model, context)
        session_id = f"ses_{len(self.state)}"
        plan = request.decode_plan or session.PAGED_DECODE_PLAN_PLAN_ONCE
        self.state[session_id] = session.Session(
            session_id=session_id,
            model=request.model,
            decode_plan=plan,
            state=session.SESSION_STATE_ACTIVE,
            labels=request.labels,
            priority=request.priority,
        )
        self.log[session_id] = input_ids(request.initial_input)
        self.state[session_id].num_tokens = len(self.log[session_id])
        return session.OpenSessionResponse(session=self.state[session_id])

    def GetSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note("GetSession", request, context)
        return session.GetSessionResponse(session=self.state[request.session_id])

    def ListSessions(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note("ListSessions", request, context)
        newest_first = list(reversed(self.state.values()))
        start, size = int(request.page_token or 0), request.page_size or self.default_page_size
        more = start + size < len(newest_first)
        return session.ListSessionsResponse(
            sessions=newest_first[start : start + size], next_page_token=str(start + size) if more else ""
        )

    def AppendInput(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note("AppendInput", request, context)
        state, log = self.state[request.session_id], self.log[request.session_id]
        log += input_ids(request.input)
        state.revision, state.num_tokens = state.revision + 1, len(log)
        return session.AppendInputResponse(session=state)

    def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note("Tokenize", request, context)
        self._check_model(request.model, context)
        return model.TokenizeResponse(token_ids=input_ids(request.input))

    def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note("Detokenize", request, context)
        self._check_model(request.model, context)
        spelt = [token_id for token_id in request.token_ids if token_id not in self.control_ids]
        return model.DetokenizeResponse(text="".join(map(chr, spelt)))

    def UpdateSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note("UpdateSession", request, context)
        state = self.state[request.session_id]
        state.decode_plan = request.decode_plan or state.decode_plan
        state.labels.update(request.labels)
        state.priority = request.priority if request.HasField("priority") else state.priority
        return session.UpdateSessionResponse(session=state)

    def CloseSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note("CloseSession", request, context)
        self.state[request.session_id].state = session.SESSION_STATE_CLOSED
        return session.CloseSessionResponse(session=self.state[request.session_id])

    def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note("ListModels", request, context)
        models = [
            model.Model(name=name, architecture="llama", num_parameters=134_515_008, max_context_tokens=8192)
            for name in self.models
        ]
        return model.ListModelsResponse(models=models)

    def CancelGeneration(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note("CancelGeneration", request, context)
        if request.generation_id not in self._cancels:
            Refusal(grpc.StatusCode.NOT_FOUND, "GENERATION_NOT_FOUND").abort(context)
        if not self.ignores_cancels:
            self._cancels[request.generation_id].set()
        return generation.CancelGenerationResponse()

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        with self._running_lock:
            self._running += 1
            self.ended.clear()
        try:
            self._note("Generate", request, context)
            yield from self._turn(request, context) if self.script is None else self.script
        finally:
            with self._running_lock:
                self._running -= 1
                if not self._running:
                    self.ended.set()

    def _turn(self, request: Any, context: Any) -> Iterator[Any]:
        log, state = self.log[request.session_id], self.state[request.session_id]
        ids = input_ids(request.input)
        generation_id = f"gen_{len(self._cancels)}"
        cancelled = self._cancels[generation_id] = threading.Event()
        left = threading.Event()
        context.add_callback(left.set)
        usage = generation.Usage(input_tokens=len(ids), cached_tokens=max(0, len(log) - 1))
        yield generation.GenerateResponse(
            started=generation.GenerationStarted(
                generation_id=generation_id,
                sampling=self.sampling,
                usage=usage,
                input_token_ids=ids if request.response.input_token_ids else (),
            )
        )
        left.wait(self.first_token_delay_s)
        limit = request.stopping.max_tokens or 1000
        reason = generation.FINISH_REASON_MAX_TOKENS if limit < len(ids) else generation.FINISH_REASON_EOS
        reason = reason if self.end_reason is None else self.end_reason
        finished = generation.GenerationFinished()
        reply = ids[:limit]
        for stop in request.stopping.stop_sequences:
            if (at := "".join(map(chr, reply)).find(stop)) >= 0:
                reply, reason, finished.stop_sequence = (
                    reply[:at],
                    generation.FINISH_REASON_STOP_SEQUENCE,
                    stop,
                )
        for index, token_id in enumerate(reply):
            if index == self.hold_after:
                while not (left.is_set() or cancelled.wait(0.01)):
                    pass
            if index == self.fail_after:
                if self.failure.reason == "WORKER_LOST":
                    state.state = session.SESSION_STATE_FAILED
                self.failure.abort(context)
            if left.is_set():
                kept = request.cancel_policy == generation.CANCEL_POLICY_KEEP_PARTIAL and not self.rolls_back
                if kept:
                    log += ids + ids[: usage.output_tokens]
                    state.revision, state.num_tokens = state.revision + 1, len(log)
                return
            if cancelled.is_set():
                reason = generation.FINISH_REASON_CANCELLED
                break
            usage.output_tokens = index + 1
            token = generation.Token(id=token_id)
            if request.response.token_timing:
                token.timing.since_start_ns = (index + 1) * 1000
            if request.sampling.HasField("logprobs"):
                token.logprob = -index
                token.top.extend(
                    generation.TopToken(id=top, logprob=-top) for top in range(request.sampling.logprobs)
                )
            yield generation.GenerateResponse(
                chunk=generation.TokenChunk(
                    first_token_index=index, tokens=[token], text_delta=chr(token_id), usage=usage
                )
            )
        log += ids + ids[: usage.output_tokens]
        state.revision, state.num_tokens = state.revision + 1, len(log)
        steps = usage.output_tokens
        planned = state.decode_plan == session.PAGED_DECODE_PLAN_PLAN_ONCE
        finished.MergeFrom(
            generation.GenerationFinished(
                finish_reason=reason,
                usage=usage,
                timing=generation.GenerationTiming(ttft_ns=1, e2e_ns=2),
                revision=state.revision,
                plan_stats=session.PlanStats(
                    reuses=steps if planned else 0,
                    replans=0 if planned else steps,
                    launches_per_step=9,
                    host_bytes_per_step=100,
                    plan_ns=7,
                    step_ns=8,
                    arena_bytes=4096,
                ),
            )
        )
        yield generation.GenerateResponse(finished=finished)


def input_ids(content: session.Input) -> list[int]:
    """The ids that the fake makes of an input: code points, or the ids themselves."""
    kind = content.WhichOneof("content")
    if kind == "token_ids":
        return list(content.token_ids.ids)
    text = content.text if kind == "text" else "".join(m.content for m in content.messages.messages)
    return [ord(character) for character in text]
