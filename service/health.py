"""grpc.health.v1: whether there is a worker to serve with. Knows service names; does not know workers."""

from collections.abc import Collection
from typing import Any

from grpc_health.v1 import health, health_pb2

SERVICE_NAME: str = health.SERVICE_NAME
_Status = health_pb2.HealthCheckResponse


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """One status for the whole server and each of its services; Watch tells every change of it.

    Args:
        services: Full names.
    """

    def __init__(self, services: Collection[str]) -> None:
        super().__init__()
        self._names = ("", *services)
        self._status: int = _Status.SERVICE_UNKNOWN
        self._is_final = False

    async def tell(self, *, is_serving: bool) -> None:
        """Say SERVING or NOT_SERVING for all names; after `end` it stays as it is."""
        if not self._is_final:
            self._status = _Status.SERVING if is_serving else _Status.NOT_SERVING
            for name in self._names:
                await self.set(name, self._status)

    async def end(self) -> None:
        """Say NOT_SERVING from now on."""
        await self.tell(is_serving=False)
        self._is_final = True

    async def List(self, request: Any, context: Any) -> health_pb2.HealthListResponse:  # noqa: N802, ARG002
        """Answer the status of every name."""
        return health_pb2.HealthListResponse(
            statuses={name: _Status(status=self._status) for name in self._names}
        )
