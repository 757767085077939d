"""Turns that run: each a task of the gateway, apart from the calls that watch it.

Knows the worker's part of a turn and who watches; does not know requests, sessions or request ids.
A turn that everybody left before its end is cancelled in its worker, after Submit's reply, since
calls to a worker have no order.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import grpc
from structlog.typing import FilteringBoundLogger

from pagecast.v1 import generation_pb2
from pagecast.worker.v1 import worker_pb2
from service.errors import PagecastError, Reason, from_refusal
from service.events import EventLog
from service.pool.link import WorkerLink
from service.pool.mailbox import Mailbox
from service.telemetry.generations import GenerationRecord

# How long a turn's end may take to come once its cancel is answered; then nobody knows of it any more.
END_AFTER_CANCEL_S = 10.0
_LAST = frozenset({"finished", "failed"})


class Turn:
    """One turn in one worker. Made, and run, by `Turns.start`.

    Attributes:
        generation_id: Drawn by whoever made `submit`.
        is_leaving: Whether it is being cancelled since nobody watches it any more.
    """

    def __init__(
        self,
        link: WorkerLink,
        submit: worker_pb2.SubmitRequest,
        *,
        log: FilteringBoundLogger | None,
        keeps_all: bool,
    ) -> None:
        self.generation_id = submit.generation_id
        self.is_leaving = False
        self._link = link
        self._submit = submit
        self._log = log
        self._events = EventLog(keeps_all=keeps_all)
        self._record = GenerationRecord(submit.session_id, submit.generation_id)
        self._num_watchers = 0
        self._departure: grpc.StatusCode | None = None
        self._failure: Exception | None = None
        self._finished: generation_pb2.GenerationFinished | None = None
        self._num_tokens = 0
        self._is_late = False
        self._is_submitted = False
        self._is_cancel_wanted = False
        self._mailbox: Mailbox | None = None
        self._cancelling: asyncio.Task[None] | None = None
        self._task = link.spawn(self._run())

    @property
    def is_over(self) -> bool:
        """Whether nothing of it can change any more."""
        return self._task.done()

    @property
    def is_committed(self) -> bool:
        """Whether it is over and in the session's log, as its watchers were told."""
        if self._finished is None or self._failure is not None:
            return False
        is_cancelled = self._finished.finish_reason == generation_pb2.FINISH_REASON_CANCELLED
        return not is_cancelled or self._submit.cancel_policy == generation_pb2.CANCEL_POLICY_KEEP_PARTIAL

    @property
    def finished(self) -> generation_pb2.GenerationFinished | None:
        """How it ended; None where it has not, or failed."""
        return self._finished

    @property
    def num_tokens(self) -> int:
        """Length of the session's log after it; 0 where there is no `finished`."""
        return self._num_tokens

    @property
    def is_lost(self) -> bool:
        """Whether nobody knows how it ended."""
        return isinstance(self._failure, PagecastError) and self._failure.reason is Reason.WORKER_LOST

    @property
    def num_bytes(self) -> int:
        """About what its events take in memory."""
        return self._events.num_bytes

    async def ended(self) -> None:
        """Wait until it is over."""
        await asyncio.wait([self._task])

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call back once it is over, before anyone whose `ended` began later returns."""
        self._task.add_done_callback(lambda _: callback())

    def compact(self) -> None:
        """Merge the events of a turn that is over, for watchers to come."""
        self._events.compact()

    async def watch(
        self, departure: Callable[[], grpc.StatusCode] = lambda: grpc.StatusCode.CANCELLED
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield its events: started, chunks, finished; close the generator to stop watching.

        Args:
            departure: Asked when the watcher leaves before the end: the status that its call ends with.

        Raises:
            PagecastError: The turn was refused, it failed, its worker is lost; DEADLINE_EXCEEDED where that
                ended it while it was watched, kept or not.
        """
        was_over = self.is_over
        self._num_watchers += 1
        try:
            async with aclosing(self._events.read()) as events:
                async for event in events:
                    if self._is_late and not was_over and event.HasField("finished"):
                        raise PagecastError(Reason.DEADLINE_EXCEEDED, "the call's deadline has passed")
                    yield event
        except (asyncio.CancelledError, GeneratorExit):
            if self._num_watchers == 1 and not self.is_over:
                self.is_leaving = True
                self._departure = departure()
                self._want_cancel()
            raise
        finally:
            self._num_watchers -= 1

    def fail(self, error: PagecastError) -> None:
        """End it for its watchers with `error`, and cancel it in its worker."""
        if self.is_over:
            return
        self._failure = self._failure or error
        self._events.close(error)
        self._want_cancel()

    async def _run(self) -> None:
        try:
            await self._relay()
        except PagecastError as error:
            self._failure = self._failure or error
        except asyncio.CancelledError:
            self._failure = PagecastError(Reason.DRAINING, "the gateway stops")
            raise
        except Exception as error:  # a bug: told to those who watch, or by the loop where nobody does
            self._failure = error
            if self._num_watchers == 0:
                raise
        finally:
            self._events.close(self._failure)
            self._tell_log()

    async def _relay(self) -> None:
        """Submit, then take events over until the turn's end."""
        with self._link.follow(self.generation_id) as mailbox:
            self._mailbox = mailbox
            await self._link.settle(
                self._link.call(self._link.stub.Submit, self._submit), self._cancel_in_worker
            )
            self._is_submitted = True
            if self._is_cancel_wanted:
                self._start_cancel(mailbox)
            is_over = False
            try:
                last = await mailbox.hand_to(self._take_on_the_way)
                is_over = True
                self._take(last)
            finally:
                if self._cancelling is not None:
                    self._cancelling.cancel()
                elif not is_over:
                    self._link.spawn(self._link.attempt(self._cancel_in_worker))

    def _take_on_the_way(self, event: worker_pb2.GenerationEvent) -> bool:
        """Take an event unless it is the turn's last; returns whether it was taken."""
        kind = event.WhichOneof("event")
        if kind == "chunk":  # nearly always, and for every token: where it will lie, in one copy
            response = generation_pb2.GenerateResponse()
            chunk = response.chunk
            chunk.CopyFrom(event.chunk)
            self._record.observe_chunk(chunk)
            self._events.put(response)
            return True
        if kind in _LAST:
            return False
        self._take(event)
        return True

    def _take(self, event: worker_pb2.GenerationEvent) -> None:
        response = _response(event)
        self._record.observe(response)
        if response.HasField("finished"):
            self._finished = response.finished
            self._is_late = event.is_late
            self._num_tokens = event.num_tokens
        self._events.put(response)

    def _want_cancel(self) -> None:
        self._is_cancel_wanted = True
        if self._is_submitted and self._mailbox is not None and self._cancelling is None:
            self._start_cancel(self._mailbox)

    def _start_cancel(self, mailbox: Mailbox) -> None:
        self._cancelling = self._link.spawn(self._cancel(mailbox))

    async def _cancel(self, mailbox: Mailbox) -> None:
        """Cancel in the worker, and wait for the turn's end, but not for ever."""
        await self._link.attempt(self._cancel_in_worker)
        await asyncio.sleep(END_AFTER_CANCEL_S)
        mailbox.fail(PagecastError(Reason.CANCELLED, "the turn was cancelled"))

    async def _cancel_in_worker(self) -> worker_pb2.CancelResponse:
        cancel = worker_pb2.CancelRequest(
            session_id=self._submit.session_id, generation_id=self.generation_id
        )
        return await self._link.call(self._link.stub.Cancel, cancel)

    def _tell_log(self) -> None:
        if self._log is None:
            return
        status, reason = grpc.StatusCode.OK, None
        if self._departure is not None:
            status = self._departure
        elif self._is_late:
            status, reason = grpc.StatusCode.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED
        elif isinstance(self._failure, PagecastError):
            status, reason = self._failure.status, self._failure.reason
        elif self._failure is not None:
            status, reason = grpc.StatusCode.INTERNAL, Reason.INTERNAL
        self._record.log(self._log, status.name, error_reason=reason)


class Turns:
    """The turns that run in this gateway."""

    def __init__(self) -> None:
        self._running: set[Turn] = set()

    @property
    def num_running(self) -> int:
        """Turns that are not over."""
        return len(self._running)

    def start(
        self,
        link: WorkerLink,
        submit: worker_pb2.SubmitRequest,
        *,
        log: FilteringBoundLogger | None = None,
        keeps_all: bool = False,
    ) -> Turn:
        """Run a turn; watch it before anything else is awaited.

        Args:
            link: The worker that holds the session.
            submit: The turn, under a generation id drawn for it.
            log: Where its end is told; None: nowhere.
            keeps_all: Whether it can be watched more than once.
        """
        turn = Turn(link, submit, log=log, keeps_all=keeps_all)
        self._running.add(turn)
        turn.when_over(lambda: self._running.discard(turn))
        return turn

    async def wait_idle(self) -> None:
        """Wait until no turn runs."""
        while self._running:
            await asyncio.gather(*(turn.ended() for turn in self._running))

    def fail_all(self, error: PagecastError) -> None:
        """End every turn for its watchers with `error`, and cancel it in its worker."""
        for turn in tuple(self._running):
            turn.fail(error)


def _response(event: worker_pb2.GenerationEvent) -> generation_pb2.GenerateResponse:
    """Return what watchers get of an event. Raises PagecastError for `failed`."""
    match event.WhichOneof("event"):
        case "started":
            return generation_pb2.GenerateResponse(started=event.started)
        case "finished":
            return generation_pb2.GenerateResponse(finished=event.finished)
        case "failed":
            raise from_refusal(event.failed)
        case _:
            raise ValueError("the worker sent an event without content")
