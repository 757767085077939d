"""llama.cpp's benches as they are called and read, and the driver's language; no engine is installed here."""

import io
import json
import stat
from pathlib import Path

import pytest

from bench import peer_driver
from bench.peer_cases import Case
from bench.peer_engines import EngineFailed, LlamaCpp

# Flash attention takes half the time, and every call leaves its arguments.
BENCH = """#!/bin/sh
echo "$@" >> {journal}
case "$*" in *"-fa on"*) ns=32000000;; *) ns=64000000;; esac
echo '[{{"build_commit": "abc", "samples_ns": ['$ns', '$ns']}}]'
"""
BATCHED = """#!/bin/sh
echo "$@" >> {journal}
case "$*" in *"-fa on"*) s=0.4;; *) s=0.2;; esac
echo "llama: a line of its own"
echo '{{"t_pp": 9.0, "t_tg": '$s'}}'
"""


@pytest.fixture
def llama(tmp_path: Path) -> LlamaCpp:
    for name, text in (("llama-bench", BENCH), ("llama-batched-bench", BATCHED)):
        program = tmp_path / name
        program.write_text(text.format(journal=tmp_path / "journal"))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return LlamaCpp(tmp_path, tmp_path / "model.gguf", 2)


def calls(folder: Path) -> list[str]:
    return [line.partition("-t 2 ")[2] for line in (folder / "journal").read_text().splitlines()]


def test_one_session_decodes_behind_its_prompt(llama: LlamaCpp, tmp_path: Path) -> None:
    case = Case("decode", 1, 2048, 32, repeats=2)
    assert llama.run(case) == [1.0, 1.0]
    assert llama.run(case) == [1.0, 1.0]
    how = "-p 0 -n 32 -d 2048 -r 2 -o json"
    # Both ways are tried once; the faster one stays.
    assert calls(tmp_path) == [f"-fa on {how}", f"-fa off {how}", f"-fa on {how}"]
    assert llama.version == "abc"


def test_a_first_token_is_a_prompt(llama: LlamaCpp, tmp_path: Path) -> None:
    assert llama.run(Case("first_token", 1, 128, 1, repeats=2)) == [32.0, 32.0]
    assert calls(tmp_path)[0] == "-fa on -p 128 -n 0 -r 2 -o json"


def test_sessions_decode_in_a_batch(llama: LlamaCpp, tmp_path: Path) -> None:
    case = Case("decode", 16, 128, 32)
    assert llama.run(case) == [6.25]
    assert llama.run(case) == [6.25]
    how = "-npp 128 -ntg 32 -npl 16 -c 2560 --output-format jsonl"
    assert calls(tmp_path) == [f"-fa on {how}", f"-fa off {how}", f"-fa off {how}"]


def test_what_a_failing_program_said_last(llama: LlamaCpp, tmp_path: Path) -> None:
    (tmp_path / "llama-bench").write_text("#!/bin/sh\necho loading >&2\necho no such model >&2\nexit 4\n")
    with pytest.raises(EngineFailed, match=r"llama\.cpp: exit code 4: no such model"):
        llama.run(Case("first_token", 1, 128, 1))


class Counting:
    """An engine that takes a second for a prompt's token and one for each step."""

    version = "1"

    def __init__(self) -> None:
        self.prompts: list[list[list[int]]] = []

    def first_token(self, prompts: list[list[int]]) -> float:
        self.prompts.append(prompts)
        return 1.0 * len(prompts)

    def decode(self, prompts: list[list[int]], tokens: int) -> float:
        if tokens > 100:
            raise RuntimeError("too many")
        self.prompts.append(prompts)
        return 1.0 * tokens


def converse(engine: Counting, *cases: dict[str, object]) -> list[dict[str, object]]:
    answers = io.StringIO()
    peer_driver.converse(engine, io.StringIO("".join(json.dumps(case) + "\n" for case in cases)), answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_the_drivers_language() -> None:
    engine = Counting()
    decode = {"what": "decode", "sessions": 4, "context": 128, "tokens": 8, "repeats": 2}
    first = {"what": "first_token", "sessions": 1, "context": 5, "tokens": 1, "repeats": 3}
    assert converse(engine, decode, decode | {"tokens": 101}, first) == [
        {"ready": "1"},
        {"ms": [1000.0, 1000.0]},
        {"error": "RuntimeError: too many"},
        {"ms": [1000.0, 1000.0, 1000.0]},
    ]
    assert [(len(prompts), len(prompts[0])) for prompts in engine.prompts] == [(4, 128)] * 2 + [(1, 5)] * 3
    # Sessions differ, samples do not.
    assert len({tuple(prompt) for prompt in engine.prompts[0]}) == 4
    assert engine.prompts[0] == engine.prompts[1]


def test_the_driver_knows_its_engines() -> None:
    assert sorted(peer_driver.ENGINES) == ["onnxruntime", "openvino", "transformers"]
