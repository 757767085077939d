"""What a plan asks of the machine that it runs on: memory, copies, launches, order. Knows no step, no kernel.

All that is asked inside `in_order` is done in the order in which it was asked, behind the caller's back:
memory that a copy reads or writes is not to be touched by the host until a mark behind it was waited for.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class DeviceLost(RuntimeError):
    """A device answers nothing any more, whatever it is asked: only a new process gets it back."""


Launches = Callable[[], None]
"""Asks for kernel launches, one after the other."""


class Mark(Protocol):
    """A place in the order of what was asked."""

    def wait(self) -> None:
        """Returns when all that was asked before the mark is done. Raises what it failed with."""


class Device(Protocol):
    """A machine that runs behind the host, or at once."""

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors are."""

    @property
    def captures(self) -> bool:
        """Whether a replay of captured launches costs less than the launches."""

    def host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Host memory, of any content, that copies to and from the device may use behind the host's back."""

    def in_order(self) -> AbstractContextManager[None]:
        """What is asked of the device inside, by anybody, is done in order, after what was asked before."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies between host and device, or on the device. Only inside `in_order`."""

    def run(self, launches: Launches) -> None:
        """Runs launches. Only inside `in_order`."""

    def capture(self, launches: Launches) -> Launches:
        """Makes a replay of launches that ran before; nothing runs. Only inside `in_order`.

        Returns:
            What runs them, as often as it is given to `run`. It keeps what was captured alive.
        """

    def mark(self) -> Mark:
        """A mark behind all that was asked so far. Only inside `in_order`."""

    def check(self) -> None:
        """Waits for all that was asked. Raises DeviceLost where the device is beyond use."""


class _Done:
    """The mark of a device that does everything at once."""

    def wait(self) -> None:
        """Returns."""


class HostDevice:
    """The CPU, which does everything at once: for kernels under Triton's interpreter.

    NumPy, which the interpreter computes with, is not to warn: padding is computed like all else, from
    whatever is there.
    """

    torch_device = torch.device("cpu")
    captures = False

    def host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """See `Device`."""
        return torch.empty(*shape, dtype=dtype)

    def in_order(self) -> AbstractContextManager[None]:
        """See `Device`."""
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Device`."""
        target.copy_(source)

    def run(self, launches: Launches) -> None:
        """See `Device`."""
        with np.errstate(all="ignore"):
            launches()

    def capture(self, launches: Launches) -> Launches:
        """The launches themselves."""
        return launches

    def mark(self) -> Mark:
        """See `Device`."""
        return _Done()

    def check(self) -> None:
        """It is there."""


class CudaDevice:
    """A GPU of CUDA or ROCm: one stream of its own, and graphs in one memory pool.

    Args:
        device: Which; without an index the current one.

    Raises:
        ValueError: The device is no GPU.
    """

    captures = True

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"device {device} is no GPU")
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]  # torch's own
        self._pool = torch.cuda.graph_pool_handle()

    def host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Pinned memory."""
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Makes the stream of its own the current one, behind the one that was current."""
        before = torch.cuda.current_stream(self.torch_device)
        if before != self._stream:
            self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            yield

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Device`."""
        target.copy_(source, non_blocking=True)

    def run(self, launches: Launches) -> None:
        """See `Device`."""
        launches()

    def capture(self, launches: Launches) -> Launches:
        """A CUDA graph in the shared pool. Other threads may use the device meanwhile.

        Outside of inference mode: torch keeps what it makes for its first graph for all of the process, and
        could write it in no other mode.
        """
        graph = torch.cuda.CUDAGraph()
        with (
            torch.inference_mode(mode=False),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            launches()
        return graph.replay

    def mark(self) -> Mark:
        """An event on the stream."""
        return _CudaMark(self._stream.record_event())

    def check(self) -> None:
        """A fault of a kernel or of memory stays with the process: every later call fails with it."""
        try:
            torch.cuda.synchronize(self.torch_device)
        except RuntimeError as error:
            raise DeviceLost(f"{self.torch_device} is beyond use: {error}") from error


class _CudaMark:
    """An event that was recorded."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Waits without the interpreter's lock."""
        self._event.synchronize()


def device_of(device: torch.device) -> Device:
    """The machine behind a device of torch's.

    Raises:
        ValueError: It is neither the CPU nor a GPU.
    """
    return HostDevice() if device.type == "cpu" else CudaDevice(device)
