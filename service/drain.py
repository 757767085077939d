"""Refuses what would start something new while the gateway goes down. Knows method names only."""

from typing import Any, NoReturn

import grpc

from pagecast.v1 import generation_pb2, session_pb2
from service.errors import PagecastError, Reason
from service.interceptors import Continuation, Handler

_SESSIONS = session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name
_GENERATIONS = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
REFUSED_METHODS = frozenset(
    {f"/{_SESSIONS}/OpenSession", f"/{_SESSIONS}/AppendInput", f"/{_GENERATIONS}/Generate"}
)


def draining() -> PagecastError:
    """Return what callers get whose turn cannot start, or cannot go on."""
    return PagecastError(Reason.DRAINING, "the server is going down")


class DrainInterceptor(grpc.aio.ServerInterceptor):
    """Lets all calls through until `begin`, then all but those of `REFUSED_METHODS`.

    Put it behind `ErrorInterceptor`, which makes a status of what it raises.
    """

    def __init__(self) -> None:
        self._is_draining = False

    def begin(self) -> None:
        """Refuse from now on."""
        self._is_draining = True

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Return the handler that would serve the call, or one that refuses."""
        if self._is_draining and handler_call_details.method in REFUSED_METHODS:
            # Of the simplest arity: a call that ends without a response looks the same in all of them.
            return grpc.unary_unary_rpc_method_handler(_refuse)
        return await continuation(handler_call_details)


async def _refuse(_request: Any, _context: Any) -> NoReturn:
    raise draining()
