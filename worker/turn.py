"""One running turn as its caller sees it: text, times, events. Knows no tensors and no blocks."""

from dataclasses import dataclass, replace

from worker.batch import DecodePlan, Finished, FinishReason, RowResult, Started, TokenDrawn, UsageCounts
from worker.detokenize import Detokenizer
from worker.model.chat import Conversation
from worker.session import Generation, Session


@dataclass(slots=True)
class Turn:
    """Turns the scheduler's numbers into events.

    Attributes:
        session: The turn's session.
        generation: The scheduler's record of the turn.
        conversation: The session's conversation after the input, before the reply.
        detokenizer: Fresh for this turn.
        received_ns: Monotonic clock of the submit.
    """

    session: Session
    generation: Generation
    conversation: Conversation
    detokenizer: Detokenizer
    received_ns: int
    queue_ns: int = 0
    ttft_ns: int = 0
    last_token_ns: int = 0
    is_announced: bool = False

    @property
    def usage(self) -> UsageCounts:
        """Counts so far."""
        return UsageCounts(
            input_tokens=len(self.generation.input_ids),
            cached_tokens=self.generation.cached_tokens,
            reprefilled_tokens=self.generation.reprefilled_tokens,
            output_tokens=self.session.num_generated,
        )

    def start(self, now_ns: int) -> Started:
        """The turn entered its first step at `now_ns`."""
        self.is_announced = True
        self.queue_ns = now_ns - self.received_ns
        return Started(
            generation_id=self.generation.generation_id,
            usage=self.usage,
            queue_ns=self.queue_ns,
            was_dropped=self.generation.reprefilled_tokens > 0,
        )

    def token(self, result: RowResult, plan: DecodePlan, *, sample_ns: int, now_ns: int) -> TokenDrawn:
        """The token at the end of the log was drawn at `now_ns`."""
        token_id = self.session.token_ids[-1]
        itl_ns = now_ns - self.last_token_ns if self.last_token_ns else 0
        self.last_token_ns = now_ns
        self.ttft_ns = self.ttft_ns or now_ns - self.received_ns
        usage = self.usage
        return TokenDrawn(
            generation_id=self.generation.generation_id,
            session_id=self.session.session_id,
            index=usage.output_tokens - 1,
            token_id=token_id,
            text=self.detokenizer.push(token_id),
            usage=usage,
            plan=plan,
            result=result,
            since_start_ns=now_ns - self.received_ns,
            itl_ns=itl_ns,
            queue_ns=self.queue_ns,
            sample_ns=sample_ns,
            context_len=self.session.num_computed,
        )

    def end_reason(self) -> FinishReason | None:
        """Why the turn is over after its last token; None while it is not."""
        if self.session.token_ids[-1] in self.generation.eos_ids:
            return FinishReason.EOS
        if self.session.num_generated == self.generation.max_tokens:
            return FinishReason.MAX_TOKENS
        if self.session.num_tokens >= self.session.max_context_tokens:
            return FinishReason.CONTEXT_FULL
        return None

    def finish(self, reason: FinishReason, usage: UsageCounts, *, now_ns: int) -> Finished:
        """The turn ended at `now_ns`; `usage` was taken before the scheduler let go of it."""
        return Finished(
            generation_id=self.generation.generation_id,
            reason=reason,
            text=self.detokenizer.finish(),
            usage=usage,
            queue_ns=self.queue_ns,
            ttft_ns=self.ttft_ns,
            e2e_ns=now_ns - self.received_ns,
            revision=self.session.revision,
            plan_counters=replace(self.generation.plan_counters),
        )
