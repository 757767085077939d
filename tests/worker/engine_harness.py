"""An engine thread over a real tiny model, and what tests ask of it."""

from queue import SimpleQueue

from worker import commands
from worker.batch import DecodePlan, Event, Failed, Finished, TokenDrawn
from worker.commands import SamplingDefaults, SessionView, TurnBase
from worker.engine import Engine
from worker.kv.block_pool import BlockPool
from worker.kv.storage import KvStorage
from worker.model.chat import Conversation
from worker.model.llama import LlamaModel
from worker.model.tokenizer import Tokenizer
from worker.model.weights.gguf import GgufFile
from worker.runner import Runner
from worker.scheduler import PagedSessionScheduler
from worker.session import Sampling

BLOCK = 16


class Harness:
    """An engine, its events, and what a test asks of it."""

    def __init__(self, file: GgufFile, num_blocks: int = 64) -> None:
        config = file.config
        storage = KvStorage(
            num_blocks=num_blocks,
            num_layers=config.num_layers,
            block_size=BLOCK,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
        )
        self.runner = Runner(
            LlamaModel.from_gguf(file), storage, kernels="reference", max_step_tokens=24, max_step_rows=8
        )
        self.scheduler = PagedSessionScheduler(
            BlockPool(num_blocks),
            block_size=BLOCK,
            max_step_tokens=24,
            max_step_rows=8,
            max_context_tokens=512,
        )
        self.tokenizer = Tokenizer(file.tokenizer)
        self.engine = Engine(scheduler=self.scheduler, runner=self.runner, tokenizer=self.tokenizer)
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.errors: list[Exception] = []

    def start(self) -> None:
        self.engine.start(
            prepare=lambda: None,
            on_report=lambda report: [self.events.put(event) for event in report.events],
            on_error=self.errors.append,
        )

    def ask(self, command: commands.Command) -> SessionView:
        return self.engine.post(command).result(timeout=30)

    def open(self, name: str, plan: DecodePlan = DecodePlan.PLAN_ONCE) -> None:
        self.ask(commands.OpenSession(name, plan, None, SamplingDefaults(), {}))

    def submit_command(
        self, name: str, ids: tuple[int, ...], base: TurnBase, *, max_tokens: int = 8, keep: bool = False
    ) -> commands.Submit:
        return commands.Submit(
            session_id=name,
            generation_id=f"g-{name}",
            built_on_revision=base.revision,
            expected_revision=None,
            input_ids=ids,
            conversation=Conversation().with_raw_input(),
            sampling=Sampling(0.9, 1234),
            max_tokens=max_tokens,
            keeps_partial=keep,
            received_ns=1,
        )

    def submit(self, name: str, ids: tuple[int, ...], *, max_tokens: int = 8, keep: bool = False) -> None:
        base = self.engine.turn_base(name)
        self.ask(self.submit_command(name, ids, base, max_tokens=max_tokens, keep=keep))

    def collect(self, turns: int = 1) -> dict[str, list[Event]]:
        """Events by generation, until that many turns are over."""
        found: dict[str, list[Event]] = {}
        while turns:
            event = self.events.get(timeout=30)
            found.setdefault(event.generation_id, []).append(event)
            turns -= isinstance(event, Finished | Failed)
        return found


def token_ids(events: list[Event]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, TokenDrawn)]
