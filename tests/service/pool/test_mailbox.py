import asyncio

import pytest

from pagecast.worker.v1 import worker_pb2
from service.errors import PagecastError, Reason
from service.pool.mailbox import Mailbox


def event(name: str) -> worker_pb2.GenerationEvent:
    return worker_pb2.GenerationEvent(generation_id=name)


class Taker:
    """Takes all but the event `z`, and breaks on `x`."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, event: worker_pb2.GenerationEvent) -> bool:
        if event.generation_id == "x":
            raise KeyError("x")
        self.names.append(event.generation_id)
        return event.generation_id != "z"


async def test_events_come_in_order_and_an_error_behind_them() -> None:
    mailbox, take = Mailbox(), Taker()
    mailbox.put(event("a"))
    mailbox.put(event("b"))
    mailbox.fail(PagecastError(Reason.WORKER_LOST, "first"))
    mailbox.fail(PagecastError(Reason.CANCELLED, "second"))
    with pytest.raises(PagecastError, match="first"):
        await mailbox.hand_to(take)
    assert take.names == ["a", "b"]


async def test_what_comes_later_is_taken_at_once_and_up_to_what_is_not_taken() -> None:
    mailbox, take = Mailbox(), Taker()
    mailbox.put(event("a"))
    taking = asyncio.create_task(mailbox.hand_to(take))
    await asyncio.sleep(0)
    for name in ("b", "c", "z", "d"):
        mailbox.put(event(name))
    assert take.names == ["a", "b", "c", "z"]
    assert (await taking).generation_id == "z"
    mailbox.put(event("z"))
    assert (await mailbox.hand_to(take)).generation_id == "z"
    assert take.names == ["a", "b", "c", "z", "d", "z"]


async def test_an_error_ends_who_waits_and_so_does_what_taking_raises() -> None:
    failing, breaking = Mailbox(), Mailbox()
    tasks = [asyncio.create_task(mailbox.hand_to(Taker())) for mailbox in (failing, breaking)]
    await asyncio.sleep(0)
    failing.fail(PagecastError(Reason.WORKER_LOST, "lost"))
    breaking.put(event("x"))
    with pytest.raises(PagecastError, match="lost"):
        await tasks[0]
    with pytest.raises(KeyError, match="x"):
        await tasks[1]


async def test_who_was_cancelled_takes_nothing_more() -> None:
    mailbox, take = Mailbox(), Taker()
    taking = asyncio.create_task(mailbox.hand_to(take))
    await asyncio.sleep(0)
    taking.cancel()
    mailbox.fail(PagecastError(Reason.CANCELLED, "too late"))
    with pytest.raises(asyncio.CancelledError):
        await taking
    mailbox.put(event("a"))
    assert take.names == []
