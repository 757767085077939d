"""The gateway: takes sessions and streams, routes them to workers. Never imports torch."""

from service.config import prepare_process

# Here, because every module of the package is imported after it, and gRPC with the first of them.
prepare_process()
