"""Pagecast: tokens from persistent LLM sessions, streamed over gRPC.

with pagecast.Client() as client, client.open_session("smollm2-135m") as session:
    for chunk in session.generate("Why is the sky blue?", max_tokens=64):
        print(chunk.text, end="", flush=True)

`Client` blocks, `AsyncClient` is the same for asyncio; every failed call raises from the tree of
`pagecast.errors`. The generated messages and stubs are in `pagecast.v1`.
"""

from pagecast._aio_calls import AsyncGeneration
from pagecast._calls import Generation
from pagecast.aio import AsyncClient, AsyncClientSession
from pagecast.client import Client, ClientSession
from pagecast.errors import (
    Aborted,
    AlreadyExists,
    BrokenStream,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    Draining,
    FailedPrecondition,
    GenerationNotFound,
    Internal,
    InvalidArgument,
    KvExhausted,
    ModelNotFound,
    NotFound,
    NoWorker,
    NumericFailure,
    OutOfRange,
    PagecastError,
    PermissionDenied,
    PromptTooLong,
    QueueFull,
    QueueTimeout,
    QuotaExceeded,
    RequestIdReused,
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
from pagecast.options import GenerateOptions, SamplingOptions, SessionOptions
from pagecast.values import Chunk, Content, FinishReason, Message, PagedDecodePlan, Result, TurnInput

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
    "Content",
    "DataLoss",
    "DeadlineExceeded",
    "Draining",
    "FailedPrecondition",
    "FinishReason",
    "GenerateOptions",
    "Generation",
    "GenerationNotFound",
    "Internal",
    "InvalidArgument",
    "KvExhausted",
    "Message",
    "ModelNotFound",
    "NoWorker",
    "NotFound",
    "NumericFailure",
    "OutOfRange",
    "PagecastError",
    "PagedDecodePlan",
    "PermissionDenied",
    "PromptTooLong",
    "QueueFull",
    "QueueTimeout",
    "QuotaExceeded",
    "RequestIdReused",
    "ResourceExhausted",
    "Result",
    "RevisionMismatch",
    "SamplingOptions",
    "SessionBusy",
    "SessionClosed",
    "SessionExpired",
    "SessionFailed",
    "SessionNotFound",
    "SessionOptions",
    "TurnInput",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "WorkerLost",
]
