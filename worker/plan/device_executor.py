"""A program as launches on a device, at the sizes of each bucket. Knows no step and no session."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from worker.batch import TokenClass
from worker.kernels.ops import TRITON_OPERATORS
from worker.kv.storage import KvStorage
from worker.model.weights.store import WeightStore
from worker.plan.buckets import Bucket
from worker.plan.executor import KernelsUnsuitable
from worker.plan.graph import StepInputs
from worker.plan.launchers import Launchers
from worker.plan.program import Constant, Extent, Input, KvLayer, Launch, Operand, Program, Value

_MATRICES = {"embedding": 0, "linear": 1, "linear_swiglu": 1}
"""Which argument is a matrix in the form that is multiplied; other constants are plain."""
_FLOAT_BYTES = 4


class DeviceExecutor:
    """A program over memory of a device, all of which it keeps alive: captured launches hold addresses.

    Args:
        program: What to run.
        launchers: Kernels.
        store: Weights.
        kv: Pool; written.
        token_class: Of the tokens of all runs.
        max_context_tokens: That attention is cut for; rows may be shorter.
        workspace: [floats] float32, what attention of the largest bucket needs beside its result.

    Attributes:
        arena: [floats] float32, all results.

    Raises:
        KernelsUnsuitable: The program calls an operator that devices have no kernel for.
    """

    def __init__(
        self,
        program: Program,
        launchers: Launchers,
        store: WeightStore,
        kv: KvStorage,
        *,
        token_class: TokenClass,
        max_context_tokens: int,
        workspace: Tensor,
    ) -> None:
        for launch in program.launches:
            if launch.operator not in TRITON_OPERATORS:
                raise KernelsUnsuitable(f"devices have no kernel for the operator {launch.operator}")
        self._program = program
        self._launchers = launchers
        self._store = store
        self._kv = kv
        self._token_class = token_class
        self._attention: dict[str, Any] = {
            "token_class": token_class,
            "max_context_tokens": max_context_tokens,
            "workspace": workspace,
        }
        self.arena = torch.zeros(program.arena_bytes // _FLOAT_BYTES, device=kv.data.device)
        self._of_dtype = {
            name: self.arena.view(dtype)
            for name, dtype in (
                ("float32", torch.float32),
                ("float16", torch.float16),
                ("bfloat16", torch.bfloat16),
            )
        }

    def output(self, bucket: Bucket) -> Tensor:
        """Where the launches of a bucket leave the logits, [num_rows, vocab] float32."""
        return self._view(self._program.output, bucket)

    def launches(self, bucket: Bucket, inputs: StepInputs) -> list[Callable[[], Any]]:
        """The program's launches, each ready to be called, over all of a bucket.

        Args:
            bucket: Sizes of all values.
            inputs: Cut to these sizes.
        """
        return [self._launch(launch, bucket, inputs) for launch in self._program.launches]

    def _launch(self, launch: Launch, bucket: Bucket, inputs: StepInputs) -> Callable[[], Any]:
        name = launch.operator
        matrix = _MATRICES.get(name)
        arguments = [
            self._operand(operand, bucket, inputs, is_matrix=place == matrix)
            for place, operand in enumerate(launch.arguments)
        ]
        outputs = tuple(self._view(value, bucket) for value in launch.outputs)
        named: dict[str, Any] = {"out": outputs if len(outputs) > 1 else outputs[0]}
        if name in ("linear", "linear_swiglu"):
            named["token_class"] = self._token_class
        if name in ("rope_store", "paged_attention"):
            layer = next(each.layer for each in launch.arguments if isinstance(each, KvLayer))
            named |= self._scales(layer)
        if name == "paged_attention":
            named |= self._attention
        return partial(self._launchers.operators[name], *arguments, **named)

    def _scales(self, layer: int) -> dict[str, Tensor]:
        """Of a layer's heads, where the pool's values are not those that were computed."""
        keys, values = self._kv.key_scales, self._kv.value_scales
        if keys is None or values is None:
            return {}
        return {"key_scale": keys[layer], "value_scale": values[layer]}

    def _operand(self, operand: Operand, bucket: Bucket, inputs: StepInputs, *, is_matrix: bool) -> Any:
        match operand:
            case Value():
                return self._view(operand, bucket)
            case Input(name):
                return getattr(inputs, name)
            case Constant(parts) if is_matrix:
                return self._store.matrix(parts)
            case Constant(parts):
                return self._store.stacked(parts)
            case KvLayer(layer, is_key):
                return (self._kv.keys if is_key else self._kv.values)[layer]
            case _:
                return operand

    def _view(self, value: Value, bucket: Bucket) -> Tensor:
        """[rows, width], or [planes, rows, width] of several planes."""
        arena = self._of_dtype[value.dtype]
        in_float = _FLOAT_BYTES // arena.itemsize
        count = bucket.num_tokens if value.extent is Extent.TOKENS else bucket.num_rows
        shape: tuple[int, ...] = (count, value.width)
        strides: tuple[int, ...] = (value.row_stride * in_float, 1)
        if value.planes > 1:
            shape = (value.planes, *shape)
            strides = (value.plane_stride * in_float, *strides)
        return arena.as_strided(shape, strides, value.offset * in_float)
