"""`pagecast serve` up to the call that runs the gateway."""

import json

import pytest
from click.testing import CliRunner, Result

import service.server
from service.cli import main
from service.config import ServeSettings


def run(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(main, arguments, env=env)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeSettings]:
    settings: list[ServeSettings] = []

    def serve(given: ServeSettings) -> int:
        settings.append(given)
        return 3

    monkeypatch.setattr(service.server, "serve", serve)
    return settings


def test_serve_passes_flags_on_and_exits_with_the_gateways_code(served: list[ServeSettings]) -> None:
    flags = ["--model", "m.gguf", "--workers", "2", "--listen", "127.0.0.1:0", "--kernels", "triton"]
    flags += ["--decode-plan", "replan", "--kv-blocks", "64", "--max-step-tokens", "128", "--threads", "1"]
    flags += ["--max-replan-sessions", "5", "--device", "CUDA", "--weights", "bfloat16"]
    flags += ["--kv-dtype", "float8_e4m3fn", "--activations", "FLOAT32"]
    flags += [
        "--log-level",
        "DEBUG",
        "--start-timeout",
        "9",
        "--worker-address",
        "a:1",
        "--worker-address",
        "b:2",
    ]
    assert run("serve", *flags).exit_code == 3
    expected = {
        "model": "m.gguf",
        "workers": 2,
        "listen": "127.0.0.1:0",
        "device": "cuda",
        "kernels": "triton",
        "weights": "bfloat16",
        "activations": "float32",
        "kv_dtype": "float8_e4m3fn",
        "decode_plan": "replan",
        "kv_blocks": 64,
        "max_step_tokens": 128,
        "max_replan_sessions": 5,
        "threads": 1,
        "log_level": "debug",
        "start_timeout_s": 9.0,
        "worker_addresses": ("a:1", "b:2"),
    }
    assert {name: getattr(served[0], name) for name in expected} == expected


def test_serve_takes_the_environment_and_a_flag_wins(served: list[ServeSettings]) -> None:
    env = {"PAGECAST_KV_BLOCKS": "32", "PAGECAST_WORKERS": "4", "PAGECAST_WORKER_ADDRESS": "a:1,b:2"}
    result = run("serve", "--workers", "2", **env)
    assert (result.exit_code, result.stderr) == (3, "")
    assert (served[0].kv_blocks, served[0].workers, served[0].worker_addresses) == (32, 2, ("a:1", "b:2"))


@pytest.mark.parametrize(
    ("flags", "env", "named"),
    [
        (["--workers", "0"], {}, "--workers (PAGECAST_WORKERS)"),
        (["--listen", "nowhere"], {}, "--listen (PAGECAST_LISTEN)"),
        (["--worker-address", "x"], {}, "--worker-address (PAGECAST_WORKER_ADDRESS)"),
        ([], {"PAGECAST_KV_BLOCKS": "many"}, "--kv-blocks (PAGECAST_KV_BLOCKS)"),
        (["--kv-blocks", "99999999999"], {}, "--kv-blocks (PAGECAST_KV_BLOCKS)"),
        (["--max-step-tokens", "70000"], {}, "--max-step-tokens (PAGECAST_MAX_STEP_TOKENS)"),
        (["--max-replan-sessions", "-1"], {}, "--max-replan-sessions (PAGECAST_MAX_REPLAN_SESSIONS)"),
        ([], {"PAGECAST_WORKER_ADDRESS": "x"}, "--worker-address (PAGECAST_WORKER_ADDRESS)"),
        (["--start-timeout", "nan"], {}, "--start-timeout (PAGECAST_START_TIMEOUT)"),
        ([], {"PAGECAST_START_TIMEOUT": "0"}, "--start-timeout (PAGECAST_START_TIMEOUT)"),
        ([], {"PAGECAST_DEVICE": "tpu"}, "--device (PAGECAST_DEVICE)"),
        ([], {"PAGECAST_KV_DTYPE": "int4"}, "--kv-dtype (PAGECAST_KV_DTYPE)"),
        ([], {"PAGECAST_ACTIVATIONS": "int4"}, "--activations (PAGECAST_ACTIVATIONS)"),
        ([], {"PAGECAST_DECODE_PLAN": "twice"}, "--decode-plan (PAGECAST_DECODE_PLAN)"),
    ],
)
def test_serve_names_a_wrong_setting_in_one_line(
    served: list[ServeSettings], flags: list[str], env: dict[str, str], named: str
) -> None:
    result = run("serve", *flags, **env)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {named}: ")
    assert len(result.stderr.splitlines()) == 1
    assert "Value error" not in result.stderr
    assert served == []


def test_every_option_of_serve_has_its_variable_and_shows_its_default(served: list[ServeSettings]) -> None:
    values = {
        "model": "x", "workers": "3", "listen": "h:9", "worker_addresses": "h:9", "kernels": "triton",
        "device": "cpu", "weights": "file", "kv_dtype": "float16", "activations": "int8",
        "decode_plan": "replan", "kv_blocks": "7", "max_step_tokens": "7", "threads": "7",
        "pin_threads": "true", "numa": "1",
        "max_replan_sessions": "7",
        "start_timeout_s": "7", "worker_timeout_s": "7", "step_timeout_s": "7", "drain_timeout_s": "7",
        "log_level": "error",
    }  # fmt: skip
    help_text = " ".join(run("serve", "--help").stdout.split())
    options = {option.name: option for option in main.commands["serve"].params}
    assert options.keys() == values.keys() == ServeSettings.model_fields.keys()
    for name, value in values.items():
        variable = "PAGECAST_" + options[name].opts[0][2:].replace("-", "_").upper()
        assert run("serve", **{variable: value}).exit_code == 3
        default = ServeSettings.model_fields[name].default
        assert getattr(served[-1], name) != default
        assert default in (None, (), False) or f"[default: {default}]" in help_text


def test_a_misspelt_variable_is_told_and_the_clients_own_are_not(served: list[ServeSettings]) -> None:
    env = {
        "PAGECAST_KV_BLOKS": "1",
        "PAGECAST_START_TIMEOUT_S": "5",
        "PAGECAST_TARGET": "a:1",
        "PAGECAST_STOP": "x",
    }
    result = run("serve", **env, PAGECAST_WORKER_MAX_STEP_ROWS="8")
    assert result.exit_code == 3
    (line,) = result.stderr.splitlines()
    event = json.loads(line)
    assert (event["event"], event["level"]) == ("unknown_variables", "warning")
    assert event["variables"] == [
        "PAGECAST_KV_BLOKS",
        "PAGECAST_START_TIMEOUT_S",
        "PAGECAST_STOP",
        "PAGECAST_WORKER_MAX_STEP_ROWS",
    ]
    assert event["did_you_mean"] == {
        "PAGECAST_KV_BLOKS": "PAGECAST_KV_BLOCKS",
        "PAGECAST_START_TIMEOUT_S": "PAGECAST_START_TIMEOUT",
    }
