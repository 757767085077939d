import pytest

from pagecast.worker.v1 import worker_pb2
from service.errors import PagecastError, Reason
from service.pool.mailbox import Mailbox


def event(name: str) -> worker_pb2.GenerationEvent:
    return worker_pb2.GenerationEvent(generation_id=name)


async def test_events_come_in_order_and_an_error_behind_them() -> None:
    mailbox = Mailbox()
    mailbox.put(event("a"))
    mailbox.put(event("b"))
    mailbox.fail(PagecastError(Reason.WORKER_LOST, "first"))
    mailbox.fail(PagecastError(Reason.CANCELLED, "second"))
    assert [(await mailbox.take()).generation_id for _ in range(2)] == ["a", "b"]
    with pytest.raises(PagecastError, match="first"):
        await mailbox.take()
