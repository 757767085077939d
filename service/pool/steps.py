"""A worker's step reports on their way to the mailboxes of the generations that are followed.

Knows StreamSteps and how to come back after the last report; does not know whether the worker is there.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from structlog.typing import FilteringBoundLogger

from pagecast.worker.v1 import worker_pb2, worker_pb2_grpc
from service.errors import PagecastError, Reason
from service.pool.channel import Metadata
from service.pool.mailbox import Mailbox


def worker_lost() -> PagecastError:
    """Return the error of whoever waits for a worker that is gone."""
    return PagecastError(Reason.WORKER_LOST, "the worker that holds this session is lost")


def outcome_unknown() -> PagecastError:
    """Return the error of a turn whose end was told, maybe, in a report that is no longer kept."""
    return PagecastError(Reason.WORKER_LOST, "how this turn ended is not known: its worker was out of reach")


class StepReader:
    """Hands the events of one worker's reports to those who follow them.

    Attributes:
        last_report: Number of the last report that was handed out; 0 before the first.
    """

    # Quoted type: in the stubs of grpc only.
    def __init__(
        self,
        stub: "worker_pb2_grpc.WorkerServiceAsyncStub",
        owner_id: str,
        metadata: Metadata,
        log: FilteringBoundLogger,
    ) -> None:
        self.last_report = 0
        self._owner_id = owner_id
        self._stub = stub
        self._metadata = metadata
        self._log = log
        self._mailboxes: dict[str, Mailbox] = {}
        self._has_ended = False

    @contextmanager
    def follow(self, generation_id: str) -> Iterator[Mailbox]:
        """Collect a generation's events while the block runs; after `end` there is but WORKER_LOST."""
        mailbox = Mailbox()
        if self._has_ended:
            mailbox.fail(worker_lost())
        self._mailboxes[generation_id] = mailbox
        try:
            yield mailbox
        finally:
            self._mailboxes.pop(generation_id, None)

    async def read(self) -> bool:
        """Hand out reports until the stream breaks.

        Returns:
            Whether coming back makes sense: not where the worker has closed this owner's sessions.

        Raises:
            grpc.aio.AioRpcError: A bug of the worker.
        """
        request = worker_pb2.StreamStepsRequest(after_report=self.last_report, owner_id=self._owner_id)
        try:
            async for message in self._stub.StreamSteps(request, metadata=self._metadata):
                self._hand_out(message)
        except grpc.aio.AioRpcError as error:
            self._log.debug("step_stream_broken", code=error.code().name)
            if error.code() is grpc.StatusCode.OUT_OF_RANGE:
                if self.last_report == 0:
                    raise
                # The next report is no longer kept: what it told cannot be known any more.
                # Nor may a turn go on behind the gap, which its caller would not see.
                self._fail_all(outcome_unknown())
                self._mailboxes.clear()
                self.last_report = 0
            return error.code() is not grpc.StatusCode.FAILED_PRECONDITION
        return True

    def end(self) -> None:
        """Fail every generation that is followed, now and later."""
        self._has_ended = True
        self._fail_all(worker_lost())

    def _hand_out(self, message: worker_pb2.StreamStepsResponse) -> None:
        self.last_report = message.report
        mailboxes = self._mailboxes
        for event in message.events:
            mailbox = mailboxes.get(event.generation_id)
            if mailbox is not None:
                mailbox.put(event)

    def _fail_all(self, error: PagecastError) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)
