"""A device that delays, and plain torch in place of its kernels: plans of devices without a GPU or triton."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from worker.batch import TokenClass
from worker.kernels.ops import TRITON_OPERATORS, implementations
from worker.kernels.reference.bind_step import bind_step
from worker.kernels.reference.logits_sample import logits_sample
from worker.plan.device_policy import DeviceKernels
from worker.runner import Runner

POISON = 2**31 - 7


class DelayDevice:
    """Does nothing before a mark is waited for, and then no more than what is before it.

    Attributes:
        copies: Of each copy so far, what is copied, in bytes.
        num_runs: Launch lists that ran.
        num_replays: Of these the captured ones.
    """

    torch_device = torch.device("cpu")
    captures = True

    def __init__(self) -> None:
        self._asked: deque[Callable[[], object]] = deque()
        self._num_asked = 0
        self._num_done = 0
        self.copies: list[int] = []
        self.num_runs = 0
        self.num_replays = 0
        self.num_captures = 0

    @property
    def num_waiting(self) -> int:
        return len(self._asked)

    def host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, POISON).to(dtype)

    def in_order(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _ask(self, thing: Callable[[], object]) -> None:
        self._asked.append(thing)
        self._num_asked += 1

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape
        self.copies.append(source.nbytes)
        self._ask(lambda: target.copy_(source))

    def run(self, launches: Callable[[], None]) -> None:
        def run() -> None:
            self.num_runs += 1
            launches()

        self._ask(run)

    def capture(self, launches: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            launches()

        return replay

    def check(self) -> None:
        """It never fails for good."""

    def mark(self) -> "DelayMark":
        return DelayMark(self, self._num_asked)

    @torch.inference_mode()
    def finish(self, until: int) -> None:
        while self._num_done < until:
            self._num_done += 1
            self._asked.popleft()()


class DelayMark:
    def __init__(self, device: DelayDevice, place: int) -> None:
        self._device = device
        self._place = place

    def wait(self) -> None:
        self._device.finish(self._place)


class TwinLaunchers:
    """The references with `out`; products leave planes, and round what they multiply to a dtype.

    Attributes:
        rounded: That dtype.
        planes: Into how many parts products cut K where it can be cut.
        fails_at: Number of the call of an operator, counted down, that raises; None: none does.
    """

    def __init__(self, *, rounded: torch.dtype = torch.float32, planes: int = 1) -> None:
        self.name = f"twins/{rounded}/{planes}"
        self.rounded = rounded
        self.planes = planes
        self.fails_at: int | None = None
        self._plain = implementations("reference")
        self.operators = {name: getattr(self, f"_{name}", self._simple(name)) for name in TRITON_OPERATORS}

    def bind_step(self, *arguments, **named):
        bind_step(*arguments, **named)

    def logits_sample(self, logits, draws, entries, fed, *, vocab_size, workspace, out):
        assert workspace == "workspace"
        for target, source in zip(
            out, logits_sample(logits, draws, entries, fed, vocab_size=vocab_size), strict=True
        ):
            target.copy_(source)

    def sample_workspace(self, *, num_rows, num_entries, vocab_size):
        return "workspace"

    def splits(self, weight, token_class):
        return self.planes if weight.shape[1] % self.planes == 0 else 1

    def product_dtype(self, weight):
        return self.rounded

    def attention_dtype(self, kv_dtype):
        return self.rounded

    def workspace_floats(self, config, kv, token_class, *, num_tokens, num_rows, max_context_tokens):
        return num_tokens + num_rows

    def unsuitable(self, config, kv):
        return None

    def _count(self) -> None:
        if self.fails_at is not None:
            self.fails_at -= 1
            if self.fails_at == 0:
                raise RuntimeError("a launch failed")

    def _simple(self, name):
        def launch(*arguments, out):
            self._count()
            results = self._plain[name](*(self._whole(argument) for argument in arguments))
            for target, source in zip(
                out if isinstance(out, tuple) else (out,),
                results if isinstance(results, tuple) else (results,),
                strict=True,
            ):
                target.copy_(source)

        return launch

    @staticmethod
    def _whole(value):
        if not isinstance(value, Tensor) or value.dim() != 3:
            return value
        total = value[0].clone()
        for plane in value[1:]:
            total += plane
        return total

    def _linear(self, x, weight, *, token_class, out):
        self._count()
        assert isinstance(token_class, TokenClass)
        x = x.to(self.rounded).float()
        planes = out if out.dim() == 3 else out[None]
        width = x.shape[1] // len(planes)
        for number, plane in enumerate(planes):
            part = slice(number * width, (number + 1) * width)
            plane.copy_(self._plain["linear"](x[:, part], weight[:, part].contiguous()))

    def _linear_swiglu(self, x, gate_up, *, token_class, out):
        self._count()
        assert isinstance(token_class, TokenClass)
        out.copy_(self._plain["linear_swiglu"](x.to(self.rounded).float(), gate_up))

    def _rope_store(self, q, k, v, position, slots, cos, sin, keys, values, *, out):
        self._count()
        q, k, v = (self._whole(value) for value in (q, k, v))
        live = slots >= 0
        self._plain["rope_store"](
            q[live], k[live], v[live], position[live], slots[live], cos, sin, keys, values
        )
        out.copy_(self._plain["rope"](q, position, cos, sin))

    def _paged_attention(
        self,
        q,
        keys,
        values,
        table,
        context,
        starts,
        scale,
        *,
        token_class,
        max_context_tokens,
        workspace,
        out,
    ):
        self._count()
        assert workspace.numel() >= len(q) + len(context)
        assert int(context.max()) <= max_context_tokens
        out.fill_(float("nan"))  # what no row has is whatever it was
        live = int(starts[-1])
        q = q.to(self.rounded).float()
        out[:live] = self._plain["paged_attention"](q[:live], keys, values, table, context, starts, scale)


def device_runner(monkeypatch, model, kv, device=None, launchers=None, **limits) -> Runner:
    """A runner over a delaying device and twins."""
    kernels = DeviceKernels(device or DelayDevice(), launchers or TwinLaunchers())
    with monkeypatch.context() as patch:
        patch.setattr("worker.runner.kernels_named", lambda *_arguments, **_named: kernels)
        return Runner(model, kv, kernels="triton", **{"max_step_tokens": 64, "max_step_rows": 8} | limits)
