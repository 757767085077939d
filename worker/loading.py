"""From settings to what computes: device, kernels, weights, pool, runner. Knows no call and no engine."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from structlog.typing import FilteringBoundLogger

from worker.config import WorkerConfig
from worker.kernel_choice import Kernels, SettingRefused, choose_device, choose_kernels, passed_over
from worker.kv.storage import KvStorage
from worker.memory import blocks_that_fit, check_pool_fits
from worker.model.config import LlamaConfig
from worker.model.llama import LlamaModel
from worker.model.tokenizer import Tokenizer
from worker.model.weights.gguf import open_gguf, resolve_model_spec
from worker.model.weights.store import Activations
from worker.numerics import (
    check_activations,
    choose_activations,
    choose_kv_dtype,
    choose_weights,
    fingerprint,
    name_of,
    step_tokens,
)
from worker.runner import Runner

_MAX_STEP_ROWS = {"cpu": 32, "cuda": 256}
_KV_BLOCKS_ON_CPU = 1024


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to be warmed up, and what there is to tell of it. Holds no file.

    Attributes:
        runner: Over model and pool.
        device: Where they are.
        kernels: What computes.
        config: The model's sizes.
        tokenizer: The model's.
        chat_template: Its source, in Jinja; None: the model has none.
        architecture: Of the model.
        num_parameters: Of the model.
        weights: What matrices are kept as, e.g. `bfloat16+q8_0`.
        activations: What products are made of.
        kv_dtype: What keys and values are kept as, e.g. `float8_e4m3fn`.
        fingerprint: What workers have to share to agree bit for bit.
        num_kv_blocks: Blocks of the pool.
        kv_bytes: What they take once they are all in use.
        max_step_tokens: Tokens of a step at most.
        max_step_rows: Rows of a step at most.
    """

    runner: Runner
    device: torch.device
    kernels: Kernels
    config: LlamaConfig
    tokenizer: Tokenizer
    chat_template: str | None
    architecture: str
    num_parameters: int
    weights: str
    activations: Activations
    kv_dtype: str
    fingerprint: str
    num_kv_blocks: int
    kv_bytes: int
    max_step_tokens: int
    max_step_rows: int


def load(config: WorkerConfig, log: FilteringBoundLogger) -> Loaded:
    """Load what the settings ask for.

    Args:
        config: Settings.
        log: Told where something other than what was asked for, or what is in the file, is used.

    Raises:
        SettingRefused, KernelsMissing, KernelsUnsuitable: These settings can't be had on this machine.
        ModelFileError: The model can't be used.
        PoolTooLarge: There is no room for the pool.
        torch.OutOfMemoryError: The device has no room for the rest.
    """
    device = choose_device(config.device, config.kernels)
    if reason := passed_over(config.device, config.kernels):
        log.warning("device_fallback", device=str(device), reason=reason)
    max_step_tokens, max_step_rows = _limits(config, device)
    source = open_gguf(resolve_model_spec(config.model))
    tokenizer = Tokenizer(source.tokenizer)
    kernels = choose_kernels(config.kernels, source.config, config.block_size, device)
    if kernels.fallback:
        log.warning("kernels_fallback", kernels=kernels.name, reason=kernels.fallback)
    if config.thread_cpus and kernels.name != "native":
        raise SettingRefused(f"--pin-threads needs native kernels, these are {kernels.name}")
    weights = choose_weights(config.weights, kernels, device)
    # Refused before minutes of reading.
    check_activations(config.activations, kernels)
    choose_kv_dtype(config.kv_dtype, kernels, device, ())
    file = source.read(weights, device, "panels" if kernels.name == "native" else "tensors")
    if file.dequantised:
        log.info("weights_dequantised", model=config.model, formats=dict(file.dequantised))
    activations = choose_activations(config.activations, kernels, file.matrix_kinds)
    kv_dtype = choose_kv_dtype(config.kv_dtype, kernels, device, file.matrix_kinds, activations)
    model = LlamaModel.from_gguf(file, device=device)

    def storage(num_blocks: int) -> KvStorage:
        return KvStorage(
            num_blocks=num_blocks,
            num_layers=file.config.num_layers,
            block_size=config.block_size,
            num_kv_heads=file.config.num_kv_heads,
            head_size=file.config.head_size,
            dtype=kv_dtype,
            keys_across=kernels.name != "triton",
            device=device,
        )

    def runner(num_blocks: int) -> Runner:
        return Runner(
            model,
            storage(num_blocks),
            kernels=kernels.name,
            max_step_tokens=max_step_tokens,
            max_step_rows=max_step_rows,
            num_threads=config.num_threads,
            thread_cpus=config.thread_cpus,
            activations=activations,
            vocab_size=tokenizer.vocab_size,
        )

    block_bytes = KvStorage.block_bytes(
        num_layers=file.config.num_layers,
        block_size=config.block_size,
        num_kv_heads=file.config.num_kv_heads,
        head_size=file.config.head_size,
        dtype=kv_dtype,
    )
    num_blocks = config.num_kv_blocks
    if num_blocks is None and device.type == "cpu":
        num_blocks = _KV_BLOCKS_ON_CPU
    if num_blocks is None:
        num_blocks = _blocks_beside(runner, block_bytes, device, config.memory_share)
    else:
        check_pool_fits(num_blocks, block_bytes, device, config.memory_share)
    return Loaded(
        runner=runner(num_blocks),
        device=device,
        kernels=kernels,
        config=file.config,
        tokenizer=tokenizer,
        chat_template=file.tokenizer.chat_template,
        architecture=file.architecture,
        num_parameters=file.num_parameters,
        weights="+".join(file.matrix_kinds),
        activations=activations,
        kv_dtype=name_of(kv_dtype),
        fingerprint=fingerprint(kernels, file, kv_dtype, device, activations),
        num_kv_blocks=num_blocks,
        kv_bytes=num_blocks * block_bytes,
        max_step_tokens=max_step_tokens,
        max_step_rows=max_step_rows,
    )


def _limits(config: WorkerConfig, device: torch.device) -> tuple[int, int]:
    """Tokens and rows of a step at most."""
    tokens = config.max_step_tokens or step_tokens(device, config.activations)
    rows = config.max_step_rows or min(_MAX_STEP_ROWS[device.type], tokens)
    if rows > tokens:
        raise SettingRefused(f"--max-step-rows {rows} is over --max-step-tokens, here {tokens}")
    return tokens, rows


def _blocks_beside(
    make_runner: Callable[[int], Runner], block_bytes: int, device: torch.device, share: float
) -> int:
    """Blocks that fit beside weights, plans and graphs.

    What those take is measured: a runner over a pool of one block is warmed up, and dropped again. Of their
    size only block tables follow the pool's: some megabytes.
    """
    trial = make_runner(1)
    trial.warm_up()
    # Not what torch keeps at hand for later.
    torch.cuda.empty_cache()
    num_blocks = blocks_that_fit(block_bytes, device, share)
    del trial
    gc.collect()
    torch.cuda.empty_cache()
    return num_blocks
