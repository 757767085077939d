"""How a GPU is asked to capture, with torch's own calls replaced: what it then does, a GPU has to show."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from worker.plan.device import CudaDevice, HostDevice, device_of


def test_graphs_share_a_pool_and_a_stream_and_belong_to_no_inference_mode(monkeypatch):
    asked, ran = [], []

    @contextmanager
    def graph(captured, **named):
        asked.append((captured, named, torch.is_inference_mode_enabled()))
        yield

    for name, fake in (
        ("current_device", lambda: 0),
        ("Stream", lambda device: f"stream of {device}"),
        ("graph_pool_handle", lambda: "pool"),
        ("CUDAGraph", lambda: SimpleNamespace(replay=lambda: ran.append("replay"))),
        ("graph", graph),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    device = CudaDevice(torch.device("cuda"))
    assert device.torch_device == torch.device("cuda", 0)
    with torch.inference_mode():
        replays = [device.capture(lambda: ran.append("launch")) for _ in range(2)]
        assert torch.is_inference_mode_enabled()
    assert ran == ["launch"] * 2
    assert asked[0][0] is not asked[1][0]
    for _, named, is_inference in asked:
        assert named == {"pool": "pool", "stream": "stream of cuda:0", "capture_error_mode": "thread_local"}
        assert not is_inference
    replays[0]()
    assert ran[2:] == ["replay"]


def test_a_device_is_the_cpu_or_a_gpu():
    assert isinstance(device_of(torch.device("cpu")), HostDevice)
    with pytest.raises(ValueError, match="meta is no GPU"):
        device_of(torch.device("meta"))
