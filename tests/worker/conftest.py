"""A tiny model and fresh runners over it."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.tiny_model import write_tiny_gguf
from tests.worker.engine_harness import Harness
from tests.worker.numerics import make_kv
from worker.kv.storage import KvStorage
from worker.model.llama import LlamaModel
from worker.model.weights.gguf import GgufFile, read_gguf
from worker.runner import Runner

MakeRunner = Callable[..., Runner]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Small operators on busy cores wait for descheduled threads: up to 20 times slower, measured on 2."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    path = write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf", seed=7, num_heads=6, num_kv_heads=2
    )
    return LlamaModel.from_gguf(read_gguf(path))


@pytest.fixture
def make_runner(tiny_llama: LlamaModel) -> MakeRunner:
    def make(
        *, fill: float = float("nan"), kernels: str = "reference", kv: KvStorage | None = None
    ) -> Runner:
        pool = kv if kv is not None else make_kv(tiny_llama, fill=fill)
        return Runner(tiny_llama, pool, kernels=kernels, max_step_tokens=128, max_step_rows=8)

    return make


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    """A tiny model for engines; its greedy turns go on to their limit."""
    return read_gguf(write_tiny_gguf(tmp_path_factory.mktemp("engine") / "tiny.gguf", ends=False))


@pytest.fixture
def harness(file: GgufFile) -> Iterator[Harness]:
    """A started engine, in which no step may fail unseen."""
    harness = Harness(file)
    harness.start()
    yield harness
    harness.stop()
