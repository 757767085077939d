"""What a turn's end makes of its session, as the router has it. Knows no request and no watcher."""

from pagecast.worker.v1 import worker_pb2
from service.pool.link import WorkerLink
from service.router import Router
from service.turns import Turn


def take_account(router: Router[WorkerLink], link: WorkerLink, session_id: str, turn: Turn) -> None:
    """Let the router know how `turn` leaves its session, once it is over.

    A turn whose end nobody knows though its worker is there may be in the log or not: no retry of it would be
    safe, so its session has failed, and is closed in the worker.
    """

    def settle() -> None:
        if turn.finished is not None:
            router.commit(session_id, turn.finished.revision, turn.num_tokens)
        elif turn.is_lost and not link.lost.is_set():
            router.give_up(session_id)
            close = worker_pb2.CloseSessionRequest(session_id=session_id)
            link.spawn(link.attempt(lambda: link.call(link.stub.CloseSession, close)))

    turn.when_over(settle)
