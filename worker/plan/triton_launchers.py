"""Triton's kernels as a device's plans launch them. Imports triton: only who chose them imports it."""

from typing import Any

import torch

from worker.batch import TokenClass
from worker.kernels.ops import TRITON_OPERATORS, implementations
from worker.kernels.quantised import QuantisedMatrix
from worker.kernels.triton.attention_cut import KV_DTYPES, attention_cut
from worker.kernels.triton.bind_step import bind_step
from worker.kernels.triton.configs import attention_config, linear_config
from worker.kernels.triton.logits_sample import SampleWorkspace, logits_sample, sample_workspace
from worker.kernels.triton.targets import target_of
from worker.kv.storage import KvStorage
from worker.model.config import LlamaConfig
from worker.plan.device import device_of
from worker.plan.device_policy import DeviceKernels
from worker.plan.launchers import Matrix


class TritonLaunchers:
    """Triton's kernels with the configs of one device.

    Args:
        device: Where they run; a CPU means Triton's interpreter.

    Attributes:
        name: `triton` and the target.
        operators: Launchers by the operator's name.

    Raises:
        ValueError: No config suits the device.
        RuntimeError: This process was not prepared for kernels there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._target = target_of(device)
        self.name = f"triton/{self._target.name}"
        of_name = implementations("triton")
        self.operators = {name: of_name[name] for name in TRITON_OPERATORS}

    def bind_step(self, *arguments: Any, **named: Any) -> None:
        """See `worker.kernels.triton.bind_step`."""
        bind_step(*arguments, **named)

    def logits_sample(self, *arguments: Any, **named: Any) -> None:
        """See `worker.kernels.triton.logits_sample`."""
        logits_sample(*arguments, **named)

    def sample_workspace(self, *, num_rows: int, num_entries: int, vocab_size: int) -> SampleWorkspace:
        """See `Launchers`."""
        return sample_workspace(
            num_rows=num_rows, num_entries=num_entries, vocab_size=vocab_size, device=self._device
        )

    def splits(self, weight: Matrix, token_class: TokenClass) -> int:
        """See `Launchers`."""
        num_outputs, num_inputs = weight.shape
        config = linear_config(
            self._target,
            token_class,
            num_outputs=num_outputs,
            num_inputs=num_inputs,
            kind=_kind(weight),
        )
        return config.splits if num_inputs % (config.block_k * config.splits) == 0 else 1

    def product_dtype(self, weight: Matrix) -> torch.dtype:
        """See `Launchers`. Under the interpreter bfloat16 is left to the product: stores would truncate."""
        dtype = _product_dtype(weight, is_interpreted=self._is_interpreted)
        return torch.float32 if self._is_interpreted and dtype == torch.bfloat16 else dtype

    def attention_dtype(self, kv_dtype: torch.dtype) -> torch.dtype:
        """See `Launchers`; of float8 float16, whose products it is upcast for."""
        if self._is_interpreted and kv_dtype == torch.bfloat16:
            return torch.float32
        return torch.float16 if kv_dtype == torch.float8_e4m3fn else kv_dtype

    def workspace_floats(
        self,
        config: LlamaConfig,
        kv: KvStorage,
        token_class: TokenClass,
        *,
        num_tokens: int,
        num_rows: int,
        max_context_tokens: int,
    ) -> int:
        """See `Launchers`."""
        cut = attention_cut(
            attention_config(
                self._target, token_class, head_size=config.head_size, kv_dtype=_name_of(kv.data.dtype)
            ),
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            max_context_tokens=max_context_tokens,
            num_sms=self._target.num_sms,
        )
        return cut.workspace_floats(
            num_tokens=num_tokens, num_heads=config.num_heads, head_size=config.head_size
        )

    def unsuitable(self, config: LlamaConfig, kv: KvStorage) -> str | None:
        """See `Launchers`."""
        dtype = _name_of(kv.data.dtype)
        if dtype not in KV_DTYPES:
            return f"the pool holds {dtype}, kernels take {', '.join(KV_DTYPES)}"
        if config.head_size % 2:
            return f"head_size={config.head_size} is odd"
        return None

    @property
    def _is_interpreted(self) -> bool:
        return self._target.backend == "interpreter"


def triton_kernels(device: torch.device) -> DeviceKernels:
    """Triton's kernels on a device.

    Raises:
        ValueError: No config suits the device.
        RuntimeError: This process was not prepared for kernels there.
    """
    return DeviceKernels(device_of(device), TritonLaunchers(device))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(weight: Matrix) -> str:
    return weight.kind if isinstance(weight, QuantisedMatrix) else _name_of(weight.dtype)


def _product_dtype(weight: Matrix, *, is_interpreted: bool) -> torch.dtype:
    if not isinstance(weight, QuantisedMatrix):
        return weight.dtype
    return torch.float32 if is_interpreted else torch.bfloat16
