"""WorkerService over a real engine, its methods called as gRPC calls them, and a reader of its steps."""

import asyncio
import time
from typing import Any

from pagecast.v1 import generation_pb2, model_pb2, session_pb2
from pagecast.worker.v1 import worker_pb2
from tests.worker.engine_harness import Harness
from worker.batch import TokenDrawn
from worker.intake import Intake
from worker.model.chat import ChatTemplate
from worker.model.weights.gguf import GgufFile
from worker.server import WorkerService

CONTEXT: Any = None  # no method under test uses it


class Worker:
    """A service, and a reader of its steps."""

    def __init__(self, file: GgufFile, num_blocks: int = 64, max_context_tokens: int = 512) -> None:
        self.harness = Harness(
            file, num_blocks, max_context_tokens=max_context_tokens, clock_ns=time.monotonic_ns
        )
        self.logged: list[TokenDrawn] = []
        self.gone: list[int] = []
        assert file.tokenizer.chat_template is not None
        template = ChatTemplate(file.tokenizer.chat_template, self.harness.tokenizer)
        self.service = WorkerService(
            engine=self.harness.engine,
            intake=Intake(self.harness.tokenizer, template),
            model=model_pb2.Model(name="tiny", vocab_size=272, max_context_tokens=1024),
            version="test",
            num_kv_blocks=num_blocks,
            log_tokens=self.logged.extend,
            log_gone=self.gone.append,
        )
        self.events: dict[str, list[worker_pb2.GenerationEvent]] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self._reader: asyncio.Task[None] | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.harness.start(lambda report: loop.call_soon_threadsafe(self.service.deliver, report))
        self._reader = asyncio.create_task(self._read())

    async def stop(self) -> None:
        self.service.close()
        assert self._reader is not None
        await self._reader
        self.harness.stop()

    async def _read(self) -> None:
        async for report in self.service.StreamSteps(worker_pb2.StreamStepsRequest(), CONTEXT):
            for event in report.events:
                self.events.setdefault(event.generation_id, []).append(event)
                if event.HasField("finished") or event.HasField("failed"):
                    self._ended(event.generation_id).set()

    def _ended(self, generation_id: str) -> asyncio.Event:
        return self._ends.setdefault(generation_id, asyncio.Event())

    async def events_of(self, generation_id: str) -> list[worker_pb2.GenerationEvent]:
        """All events of a turn, once it is over."""
        async with asyncio.timeout(30):
            await self._ended(generation_id).wait()
        return self.events[generation_id]

    async def open(self, **fields: Any) -> worker_pb2.OpenSessionResponse:
        request = worker_pb2.OpenSessionRequest(**{"session_id": "a"} | fields)
        return await self.service.OpenSession(request, CONTEXT)

    async def submit(self, **fields: Any) -> worker_pb2.SubmitResponse:
        source = session_pb2.Input(token_ids=session_pb2.TokenIds(ids=[5, 6, 7]))
        request = worker_pb2.SubmitRequest(
            **{
                "session_id": "a",
                "generation_id": "g",
                "input": source,
                "stopping": generation_pb2.StoppingCriteria(max_tokens=4),
            }
            | fields
        )
        return await self.service.Submit(request, CONTEXT)

    async def turn(self, **fields: Any) -> list[worker_pb2.GenerationEvent]:
        """Submit and wait for the end; the turn's events."""
        answer = await self.submit(**fields)
        assert answer.HasField("accepted"), answer
        return await self.events_of(fields.get("generation_id", "g"))
