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


class StepReader:
    """Hands the events of one worker's reports to those who follow them.

    Attributes:
        last_report: Number of the last report that was handed out; 0 before the first.
    """

    # Quoted type: in the stubs of grpc only.
    def __init__(
        self, stub: "worker_pb2_grpc.WorkerServiceAsyncStub", metadata: Metadata, log: FilteringBoundLogger
    ) -> None:
        self.last_report = 0
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
            del self._mailboxes[generation_id]

    async def read(self) -> None:
        """Hand out reports until the stream breaks. Raises grpc.aio.AioRpcError for a bug of the worker."""
        request = worker_pb2.StreamStepsRequest(after_report=self.last_report)
        try:
            async for message in self._stub.StreamSteps(request, metadata=self._metadata):
                self._hand_out(message)
        except grpc.aio.AioRpcError as error:
            self._log.debug("step_stream_broken", code=error.code().name)
            if error.code() is grpc.StatusCode.OUT_OF_RANGE:
                if self.last_report == 0:
                    raise
                # The next report is no longer kept: what it told cannot be known any more.
                self._fail_all()
                self.last_report = 0

    def end(self) -> None:
        """Fail every generation that is followed, now and later."""
        self._has_ended = True
        self._fail_all()

    def _hand_out(self, message: worker_pb2.StreamStepsResponse) -> None:
        self.last_report = message.report
        for event in message.events:
            mailbox = self._mailboxes.get(event.generation_id)
            if mailbox is not None:
                mailbox.put(event)

    def _fail_all(self) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.fail(worker_lost())
