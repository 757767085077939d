"""Folds the events of one generation into chunks and a result. Knows no channel and no call."""

import time
from collections.abc import Callable
from itertools import pairwise

import grpc

from pagecast.errors import BrokenStream
from pagecast.v1 import generation_pb2
from pagecast.values import Chunk, FinishReason, Result


class Turn:
    """What has arrived of one generation. Made when the call is sent: times count from there.

    Attributes:
        generation_id: None until the server has announced it.
        result: None until the last event has arrived.
        is_cancelled: Whether this side has ended the call.
        failure: What reading it raised; None: nothing. As text: the exception would keep its reader alive.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.generation_id: str | None = None
        self.result: Result | None = None
        self.is_cancelled = False
        self.failure: str | None = None
        self._clock_ns = clock_ns
        self._sent_ns = clock_ns()
        self._started = generation_pb2.GenerationStarted()
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []  # [tokens], or empty where not asked for
        self._top_logprobs: list[tuple[tuple[int, float], ...]] = []  # as `_logprobs`
        self._arrivals_ns: list[int] = []  # [tokens]

    def fold(self, response: generation_pb2.GenerateResponse) -> Chunk | None:
        """Take one event in; a chunk event comes back as `Chunk`.

        Raises:
            BrokenStream: A token is missing or doubled, or the event does not belong here.
        """
        event = response.WhichOneof("event")
        if event == "chunk" and self.result is None and self.generation_id is not None:  # nearly always
            return self._fold_chunk(response.chunk)
        if event is None:  # of a kind newer than this client
            return None
        if self.result is not None or (self.generation_id is None) != (event == "started"):
            raise _broken(f"the event {event} came out of order")
        if event == "started":
            self._started = response.started
            self.generation_id = response.started.generation_id
            return None
        self.result = self._finish(response.finished)
        return None

    @property
    def text(self) -> str:
        """All text deltas so far."""
        return "".join(self._text)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids so far."""
        return tuple(self._token_ids)

    def require_result(self) -> Result:
        """The result. Raises RuntimeError, which says why, where the last event has not arrived."""
        if self.result is not None:
            return self.result
        if self.failure is not None:
            raise RuntimeError(f"the generation has no result: it ended with {self.failure}")
        if self.is_cancelled:
            raise RuntimeError("the generation was cancelled before it had been read to its end")
        raise RuntimeError("the generation has not ended: read it to its end first")

    def check_ended(self) -> None:
        """Raise BrokenStream where the stream has closed without its last event."""
        if self.result is None:
            raise _broken("the stream closed before its last event")

    def _fold_chunk(self, message: generation_pb2.TokenChunk) -> Chunk:
        expected = len(self._token_ids)
        if message.first_token_index != expected:
            raise _broken(f"token {expected} was due, {message.first_token_index} came")
        token_ids, timings, logprobs, top_logprobs = [], [], [], []
        for token in message.tokens:
            token_ids.append(token.id)
            if token.HasField("timing"):
                timings.append(token.timing)
            if token.HasField("logprob"):
                logprobs.append(token.logprob)
                top_logprobs.append(tuple((top.id, top.logprob) for top in token.top))
        now_ns, text = self._clock_ns(), message.text_delta
        self._arrivals_ns += [now_ns] * len(token_ids)
        self._token_ids += token_ids
        self._text.append(text)
        self._logprobs += logprobs
        self._top_logprobs += top_logprobs
        return Chunk(text, tuple(token_ids), expected, tuple(timings), tuple(logprobs), tuple(top_logprobs))

    def _finish(self, finished: generation_pb2.GenerationFinished) -> Result:
        reason = FinishReason(finished.finish_reason)
        # A cancelled turn may have been rolled back, its tokens with it.
        if reason is not FinishReason.CANCELLED and finished.usage.output_tokens != len(self._token_ids):
            raise _broken(f"{finished.usage.output_tokens} tokens were sent, {len(self._token_ids)} came")
        arrivals = self._arrivals_ns
        stopped_by = finished.WhichOneof("stopped_by")
        return Result(
            generation_id=self._started.generation_id,
            text=self.text,
            token_ids=self.token_ids,
            input_token_ids=tuple(self._started.input_token_ids),
            finish_reason=reason,
            stopped_by=getattr(finished, stopped_by) if stopped_by else None,
            sampling=self._started.sampling,
            usage=finished.usage,
            timing=finished.timing,
            plan_stats=finished.plan_stats,
            revision=finished.revision,
            ttft_ms=(arrivals[0] - self._sent_ns) / 1e6 if arrivals else None,
            itl_ms=tuple((b - a) / 1e6 for a, b in pairwise(arrivals)),
            logprobs=tuple(self._logprobs),
            top_logprobs=tuple(self._top_logprobs),
        )


def _broken(message: str) -> BrokenStream:
    return BrokenStream(message, code=grpc.StatusCode.UNKNOWN, reason="BROKEN_STREAM")
