"""One log event per generation, measured by the gateway's monotonic clock.

Knows the events of a stream and their clock; never looks at text.
"""

import time

from structlog.typing import FilteringBoundLogger

from pagecast.v1 import generation_pb2

_PREFIX = "FINISH_REASON_"


class GenerationRecord:
    """Watches one generation from its call to its end.

    Times start when the record is made. What never became known stays None in the event.
    """

    def __init__(self, session_id: str, generation_id: str) -> None:
        self._session_id = session_id
        self._generation_id = generation_id
        self._start_ns = time.monotonic_ns()
        self._first_token_ns: int | None = None
        self._last_token_ns = 0
        # The last that tells usage.
        self._told: generation_pb2.GenerationStarted | generation_pb2.TokenChunk | None = None
        self._finished: generation_pb2.GenerationFinished | None = None
        self._num_tokens = 0

    def observe(self, response: generation_pb2.GenerateResponse) -> None:
        """Note one response on its way to the client that is no chunk."""
        match response.WhichOneof("event"):
            case "started":
                self._told = response.started
            case "finished":
                self._finished = response.finished

    def observe_chunk(self, chunk: generation_pb2.TokenChunk) -> None:
        """Note one chunk on its way to the client."""
        if chunk.HasField("usage"):
            self._told = chunk
        if num_tokens := len(chunk.tokens):
            self._last_token_ns = time.monotonic_ns()
            self._num_tokens += num_tokens
            if self._first_token_ns is None:
                self._first_token_ns = self._last_token_ns

    def log(self, log: FilteringBoundLogger, status: str, *, error_reason: str | None = None) -> None:
        """Write the event.

        Args:
            log: Where to.
            status: The gRPC status that the call ended with.
            error_reason: The `ErrorInfo` reason of a turn that was refused or failed.
        """
        stats = self._finished.plan_stats if self._finished is not None else None
        told = self._finished or self._told
        usage = told.usage if told is not None else None
        log.info(
            "generation",
            session_id=self._session_id,
            generation_id=self._generation_id,
            ttft_ns=None if self._first_token_ns is None else self._first_token_ns - self._start_ns,
            tpot_ns=self._tpot_ns(),
            e2e_ns=time.monotonic_ns() - self._start_ns,
            input_tokens=usage.input_tokens if usage is not None else None,
            cached_tokens=usage.cached_tokens if usage is not None else None,
            output_tokens=self._num_tokens,
            status=status,
            error_reason=error_reason,
            finish_reason=self._finish_reason(),
            plan_builds=stats.builds if stats is not None else None,
            plan_reuses=stats.reuses if stats is not None else None,
            plan_replans=stats.replans if stats is not None else None,
        )

    def _tpot_ns(self) -> int | None:
        """(last token - first token) / (n - 1); None for fewer than two tokens."""
        if self._first_token_ns is None or self._num_tokens < 2:
            return None
        return (self._last_token_ns - self._first_token_ns) // (self._num_tokens - 1)

    def _finish_reason(self) -> str | None:
        if self._finished is None:
            return None
        return generation_pb2.FinishReason.Name(self._finished.finish_reason).removeprefix(_PREFIX)
