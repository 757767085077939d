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
from worker.kernel_choice import SettingRefused
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
def test_a_cpu_gets_its_own_limits_and_numbers(kernels: str, tiny: Path) -> None:
    log = Log()
    loaded = load(settings(tiny, "--kernels", kernels), log)  # type: ignore[arg-type]
    assert (loaded.num_kv_blocks, loaded.max_step_tokens, loaded.max_step_rows) == (1024, 64, 32)
    dtype = torch.float16 if kernels == "native" else torch.float32
    assert (loaded.weights, loaded.activations, loaded.kernels.name) == ("float32", "float32", kernels)
    assert loaded.kv_dtype == str(dtype).removeprefix("torch.")
    assert loaded.kv_bytes == loaded.runner._kv.num_bytes == 1024 * 2 * 2 * 2 * 16 * 16 * dtype.itemsize
    assert (loaded.config.num_layers, loaded.architecture) == (2, "llama")
    assert loaded.num_parameters == sum(x.numel() for x in loaded.runner._model.weights.values())
    kv = loaded.runner._kv
    assert (kv.num_blocks, kv.dtype, kv.keys_across) == (1024, dtype, True)
    assert log.events == []
    small = load(settings(tiny, "--kernels", kernels, "--max-step-tokens", "9", "--kv-blocks", "3"), log)  # type: ignore[arg-type]
    assert (small.num_kv_blocks, small.max_step_tokens, small.max_step_rows) == (3, 9, 9)


FORMATS = {"token_embd.weight": "Q8_0", "blk.0.ffn_gate.weight": "Q4_1", "blk.0.ffn_up.weight": "Q5_0"}


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        ((), ("float32+q4_1+q5_0+q8_0", "int8", "float16")),
        (("--kv-dtype", "int8"), ("float32+q4_1+q5_0+q8_0", "int8", "int8")),
        (("--activations", "float32"), ("float32+q4_1+q5_0+q8_0", "float32", "float16")),
        (("--weights", "bfloat16", "--kv-dtype", "bfloat16"), ("bfloat16", "float32", "bfloat16")),
        (("--weights", "float32", "--kv-dtype", "float32"), ("float32", "float32", "float32")),
    ],
)
def test_native_kernels_keep_and_multiply_what_flags_say(
    flags: tuple[str, ...], numbers: tuple[str, str, str], tmp_path: Path
) -> None:
    log = Log()
    model = write_tiny_gguf(tmp_path / "tiny.gguf", formats=FORMATS)
    loaded = load(settings(model, "--kernels", "native", "--kv-blocks", "8", *flags), log)  # type: ignore[arg-type]
    weights, activations, kv_dtype = numbers
    assert (loaded.weights, loaded.activations, loaded.kv_dtype) == numbers
    told = f"/weights-{weights}/activations-{activations}/kv-{kv_dtype}/"
    assert told in loaded.fingerprint
    loaded.runner.warm_up()
    # Gate and up lie in two formats, and are read side by side.
    pair = ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight")
    assert loaded.runner.widened_weights == ((pair,) if "q4_1" in weights else ())
    assert log.events == []


def test_what_native_kernels_do_not_multiply_is_bfloat16_and_told(tmp_path: Path) -> None:
    log = Log()
    model = write_tiny_gguf(tmp_path / "tiny.gguf", hidden_size=256, formats={"blk.0.ffn_up.weight": "TQ1_0"})
    loaded = load(settings(model, "--kernels", "native", "--kv-blocks", "8"), log)  # type: ignore[arg-type]
    assert loaded.weights == "bfloat16+float32"
    told = {"model": str(model), "formats": {"TQ1_0": 1}}
    assert log.events == [("weights_dequantised", told)]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ("--kernels", "native", "--activations", "int8"),
            "--activations int8 needs quantised weights, they",
        ),
        (("--weights", "file", "--kernels", "auto"), "--weights file: --kernels reference"),
        (("--activations", "int8", "--kernels", "auto"), "--activations int8: --kernels reference"),
        (("--kv-dtype", "float16", "--kernels", "auto"), "--kv-dtype float16: --kernels reference"),
    ],
)
def test_numbers_that_cannot_be_had_are_refused(flags: tuple[str, ...], told: str, tmp_path: Path) -> None:
    # Heads of 24 suit reference kernels only.
    head_size = 16 if "native" in flags else 24
    model = write_tiny_gguf(tmp_path / "tiny.gguf", head_size=head_size)
    with pytest.raises(SettingRefused, match=f"^{told}"):
        load(settings(model, "--kv-blocks", "8", *flags), Log())  # type: ignore[arg-type]


def test_nothing_keeps_the_file_once_its_weights_are_packed(tiny: Path) -> None:
    loaded = load(settings(tiny, "--kernels", "native"), Log())  # type: ignore[arg-type]
    maps = Path("/proc/self/maps")
    assert str(tiny) in maps.read_text(encoding="utf-8")
    loaded.runner.warm_up()
    loaded.runner.release_plain_weights()
    gc.collect()
    assert str(tiny) not in maps.read_text(encoding="utf-8")


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
