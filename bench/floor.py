"""How fast a step could be at best: what it has to read, and how fast this machine reads.

Knows programs and the sizes of what they read; knows no clock but that of reading.
"""

import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.loading import Bench
from worker.kv.storage import KvStorage
from worker.plan.decode_session import step_program
from worker.plan.program import Constant, Launch

if TYPE_CHECKING:
    import pagecast_native

READ_BYTES = 256 << 20
"""Far over any cache; as much as is read of a model's weights."""
PRODUCTS = ("linear", "linear_swiglu")
"""Operators that read a whole matrix in each step."""
_COLUMNS = 1024


def weight_bytes(bench: Bench) -> int:
    """Bytes of weights that a step reads: every matrix of a product once, as it is kept in memory.

    A table that is read by row, as the embedding, does not count unless it is a product's matrix too; nor do
    norms' vectors, some kilobytes a layer.
    """
    program = step_program(bench.llama, bench.pool(1), bench.capacity)
    launches = [launch for launch in program.launches if launch.operator in PRODUCTS]
    if bench.kernels.name == "native":
        packed = [packed_weight(bench, launch) for launch in launches]
        return sum({id(each): each.num_bytes for each in packed}.values())
    store = bench.llama.store
    return sum(store.stacked(parts).nbytes for parts in {_weight(launch).parts for launch in launches})


def packed_weight(bench: Bench, launch: Launch) -> "pagecast_native.PackedMatrix":
    """The matrix of a product as native kernels read it; packed once, for plans too."""
    is_pair = launch.operator == "linear_swiglu"
    return bench.llama.store.packed(_weight(launch).parts, wants_one_format=is_pair)


def _weight(launch: Launch) -> Constant:
    (weight,) = (argument for argument in launch.arguments if isinstance(argument, Constant))
    return weight


def token_bytes(kv: KvStorage) -> float:
    """Bytes of keys and values of a token in all layers, scales included."""
    return kv.num_bytes / (kv.num_blocks * kv.block_size)


class Reader:
    """Reads a large buffer with the threads that a step has, in every way there is here.

    torch sums it, and native kernels multiply it with one row as float32 weights. Which is faster depends on
    machine and load; a bandwidth below what the machine gives would flatter whoever is measured beside it.

    Args:
        num_threads: That read.
        num_bytes: Of the buffer.
    """

    def __init__(self, num_threads: int, num_bytes: int = READ_BYTES) -> None:
        rows = max(1, num_bytes // (4 * _COLUMNS))
        self._num_bytes = rows * _COLUMNS * 4
        self._num_threads = num_threads
        self._data = torch.ones(rows, _COLUMNS)
        self._ways: list[Callable[[], object]] = [self._sum]
        if find_spec("pagecast_native") is not None:
            self._ways.append(self._product(rows))
        self.read()  # the first touch of memory, and of threads, is nobody's bandwidth

    def read(self) -> float:
        """Reads the buffer once in each way; returns the fastest one's bytes per second."""
        times = []
        for way in self._ways:
            start = time.perf_counter()
            way()
            times.append(time.perf_counter() - start)
        return self._num_bytes / min(times)

    def _sum(self) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        self._data.sum()
        torch.set_num_threads(before)

    def _product(self, rows: int) -> Callable[[], object]:
        native: Any = import_module("pagecast_native")
        arena = np.zeros(_COLUMNS + rows + 32, np.float32)
        arena = arena[-(arena.ctypes.data // 4) % 16 :]
        program = native.Program(native.Team(self._num_threads), max_tokens=1, max_rows=1)
        width = -(-rows // 16) * 16
        x = native.View(arena, 0, _COLUMNS, _COLUMNS, "T")
        program.linear(x, native.PackedMatrix([self._data]), native.View(arena, _COLUMNS, width, rows, "T"))
        return lambda: program.run(1, 1, 1)
