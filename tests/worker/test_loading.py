"""What `load` makes of settings, and how a pool is sized beside everything else on a GPU."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_model import write_tiny_gguf
from worker import loading
from worker.config import WorkerConfig
from worker.loading import load


class Log:
    """Collects events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    warning = info


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


def settings(model: Path, *flags: str) -> WorkerConfig:
    return WorkerConfig.load(["--model", str(model), "--listen", "a:1", "--device", "cpu", *flags])


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_a_cpu_gets_its_own_limits_and_a_pool_of_float32(kernels: str, tiny: Path) -> None:
    log = Log()
    loaded = load(settings(tiny, "--kernels", kernels), log)  # type: ignore[arg-type]
    assert (loaded.num_kv_blocks, loaded.max_step_tokens, loaded.max_step_rows) == (1024, 64, 32)
    assert (loaded.weights, loaded.kv_dtype, loaded.kernels.name) == ("float32", "float32", kernels)
    assert (loaded.config.num_layers, loaded.architecture) == (2, "llama")
    assert loaded.num_parameters == sum(x.numel() for x in loaded.runner._model.weights.values())
    kv = loaded.runner._kv
    assert (kv.num_blocks, kv.dtype, kv.keys_across) == (1024, torch.float32, True)
    assert log.events == []
    small = load(settings(tiny, "--kernels", kernels, "--max-step-tokens", "9", "--kv-blocks", "3"), log)  # type: ignore[arg-type]
    assert (small.num_kv_blocks, small.max_step_tokens, small.max_step_rows) == (3, 9, 9)


def test_nothing_keeps_weights_that_the_runner_lets_go(tiny: Path) -> None:
    loaded = load(settings(tiny, "--kernels", "native"), Log())  # type: ignore[arg-type]
    matrix = weakref.ref(loaded.runner._model.weights["blk.0.ffn_up.weight"])
    assert matrix() is not None
    loaded.runner.warm_up()
    loaded.runner.release_plain_weights()
    gc.collect()
    assert matrix() is None


def test_a_pool_is_sized_while_everything_else_is_there_and_nothing_of_the_trial_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []

    class Trial:
        def __init__(self, num_blocks: int) -> None:
            told.append(f"made over {num_blocks}")
            self.itself = self  # plans refer in circles
            alive.append(weakref.ref(self))

        def warm_up(self) -> None:
            told.append("warmed up")

    alive: list[weakref.ref[Trial]] = []

    def fits(block_bytes: int, device: torch.device, share: float) -> int:
        assert alive[0]() is not None
        told.append(f"measured for {block_bytes} bytes on {device}, {share}")
        return 7

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("emptied"))
    monkeypatch.setattr(loading, "blocks_that_fit", fits)
    assert loading._blocks_beside(Trial, 512, torch.device("cuda", 0), 0.5) == 7  # type: ignore[arg-type]
    assert alive[0]() is None
    assert told == [
        "made over 1", "warmed up", "emptied", "measured for 512 bytes on cuda:0, 0.5", "emptied",
    ]  # fmt: skip
