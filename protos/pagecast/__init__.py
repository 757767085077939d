"""Pagecast: tokens from persistent LLM sessions, streamed over gRPC.

with pagecast.Client() as client, client.open_session("smollm2-135m") as session:
    for chunk in session.generate("Why is the sky blue?", max_tokens=64):
        print(chunk.text, end="", flush=True)

`Client` blocks, `AsyncClient` is the same for asyncio; every failed call raises from the tree of
`pagecast.errors`. The generated messages and stubs are in `pagecast.v1`.
"""

from pagecast.aio import AsyncClient, AsyncClientSession, AsyncGeneration
from pagecast.client import Client, ClientSession, Generation
from pagecast.errors import (
    Aborted,
    AlreadyExists,
    BrokenStream,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    GenerationNotFound,
    Internal,
    InvalidArgument,
    ModelNotFound,
    NotFound,
    OutOfRange,
    PagecastError,
    PermissionDenied,
    ResourceExhausted,
    RevisionMismatch,
    SessionBusy,
    SessionClosed,
    SessionExpired,
    SessionFailed,
    SessionNotFound,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    WorkerLost,
)
from pagecast.options import GenerateOptions, SessionOptions
from pagecast.values import Chunk, FinishReason, Message, PagedDecodePlan, Result

PLAN_ONCE = PagedDecodePlan.PLAN_ONCE
REPLAN = PagedDecodePlan.REPLAN

__all__ = [
    "PLAN_ONCE",
    "REPLAN",
    "Aborted",
    "AlreadyExists",
    "AsyncClient",
    "AsyncClientSession",
    "AsyncGeneration",
    "BrokenStream",
    "Cancelled",
    "Chunk",
    "Client",
    "ClientSession",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "FinishReason",
    "GenerateOptions",
    "Generation",
    "GenerationNotFound",
    "Internal",
    "InvalidArgument",
    "Message",
    "ModelNotFound",
    "NotFound",
    "OutOfRange",
    "PagecastError",
    "PagedDecodePlan",
    "PermissionDenied",
    "ResourceExhausted",
    "Result",
    "RevisionMismatch",
    "SessionBusy",
    "SessionClosed",
    "SessionExpired",
    "SessionFailed",
    "SessionNotFound",
    "SessionOptions",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "WorkerLost",
]
