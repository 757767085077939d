from typing import Any

import pytest
from pydantic import ValidationError

from service.config import ClientSettings, ServeSettings


def test_defaults() -> None:
    settings = ServeSettings()
    assert (settings.model, settings.workers, settings.listen) == ("smollm2-135m", 1, "127.0.0.1:7070")
    assert settings.worker_addresses == ()
    assert settings.kv_blocks is None
    assert ClientSettings().target == "127.0.0.1:7070"


def test_environment_is_read_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGECAST_WORKERS", "3")
    monkeypatch.setenv("PAGECAST_KERNELS", "triton")
    monkeypatch.setenv("PAGECAST_WORKER_ADDRESS", "a:1,unix:/run/w.sock")
    monkeypatch.setenv("PAGECAST_TARGET", "example:9")
    settings = ServeSettings(kernels="reference")
    assert (settings.workers, settings.kernels) == (3, "reference")
    assert settings.worker_addresses == ("a:1", "unix:/run/w.sock")
    assert ServeSettings(worker_addresses=("b:2",)).worker_addresses == ("b:2",)
    assert ClientSettings().target == "example:9"


def test_environment_without_prefix_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "x")
    monkeypatch.setenv("WORKER_ADDRESSES", "a:1")
    assert ServeSettings() == ServeSettings(model="smollm2-135m", worker_addresses=())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""), ("workers", 0), ("workers", 65), ("workers", "many"),
        ("listen", "7070"), ("listen", ":7070"), ("listen", "a:70000"), ("listen", "a b:1"),
        ("listen", "unix:/x"), ("worker_addresses", ("a",)), ("worker_addresses", ("a:0",)),
        ("worker_addresses", ("a:1", "a:1")), ("worker_addresses", ("unix:",)), ("kernels", "cuda"),
        ("decode_plan", "twice"), ("kv_blocks", 0), ("max_step_tokens", 0), ("threads", 0),
        ("start_timeout_s", 0.0), ("log_level", "loud"),
    ],
)  # fmt: skip
def test_wrong_values_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        ServeSettings(**{field: value})
    (error,) = caught.value.errors()
    assert error["loc"][0] in {field, "PAGECAST_WORKER_ADDRESS"}


def test_unknown_names_and_changes_are_refused() -> None:
    with pytest.raises(ValidationError, match="worker_count"):
        ServeSettings(worker_count=1)
    with pytest.raises(ValidationError, match="frozen"):
        ServeSettings().workers = 2  # type: ignore[misc]


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:7070", "0.0.0.0:1", "my-host.local:65535"])
def test_addresses(listen: str) -> None:
    assert ServeSettings(listen=listen).listen == listen
