"""What `bench peers --set-up` runs, in which order, and what it leaves alone; nothing is fetched or built."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import peer_setup
from bench.peer_setup import SetUpFailed, ggml_options, set_up
from bench.peers import Places

ALL = ["llama.cpp and its weights", "OpenVINO GenAI", "transformers and float32 weights"]
ALL += ["onnxruntime-genai and its weights"]


class Machine:
    """Commands that make what they would make, and are kept."""

    def __init__(self, places: Places, fails: str = "nothing") -> None:
        self.places = places
        self.fails = fails
        self.commands: list[str] = []

    def run(self, command: Sequence[str]) -> None:
        line = " ".join(command)
        self.commands.append(line)
        if self.fails in line:
            raise SetUpFailed(f"{self.fails} failed")
        if "venv" in command:
            self._touch(Path(command[-1]) / "bin" / "python")
        elif "--allow-requantize" in command:
            self._touch(Path(command[-2]))
        elif "peer_export" in line:
            Path(command[-1]).mkdir()
        elif "onnxruntime_genai.models.builder" in command:
            Path(command[command.index("-o") + 1]).mkdir()

    def _touch(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.fixture
def places(tmp_path: Path) -> Places:
    places = Places(tmp_path / "peers", tmp_path / "ours.gguf")
    for program in ("llama-bench", "llama-batched-bench", "llama-quantize"):
        (places.llama_cpp / program).parent.mkdir(parents=True, exist_ok=True)
        (places.llama_cpp / program).touch()
    return places


def test_all_is_made_once(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(places)
    monkeypatch.setattr(peer_setup, "_run", machine.run)
    said: list[str] = []
    assert set_up(places, said.append) == []
    assert said == ALL
    made = [places.weights(name) for name in ("Q4_0", "Q8_0", "F32")]
    made += [places.python(name) for name in ("openvino", "transformers", "onnxruntime")]
    made += [places.float32_folder, places.onnx("Q4_0"), places.onnx("F32")]
    assert all(path.exists() for path in made)
    assert not list(places.folder.glob("*.part"))
    first = len(machine.commands)
    assert set_up(places, said.append) == []
    # What was made stays; pip looks whether its packages are there.
    assert all("pip install" in line for line in machine.commands[first:])
    assert len(machine.commands) == first + 3


def test_one_that_fails_leaves_the_others(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(places, fails="peer_export")
    monkeypatch.setattr(peer_setup, "_run", machine.run)
    failed = set_up(places, lambda what: None)
    assert failed == [
        "transformers and float32 weights: peer_export failed",
        f"{ALL[-1]}: {places.float32_folder} is not there, of which its weights are made",
    ]
    assert places.python("openvino").exists()
    assert not places.float32_folder.exists()


def test_what_a_command_said_last_is_told() -> None:
    with pytest.raises(SetUpFailed, match="exit code 3: the end"):
        peer_setup._run(["sh", "-c", "echo start >&2; echo the end >&2; exit 3"])


def test_llama_cpp_is_built_for_this_cpu() -> None:
    options = ggml_options(["avx", "avx2", "fma", "avx512f", "avx512_vnni", "amx_int8"], "x86_64")
    assert options[0] == "-DGGML_NATIVE=OFF"
    assert {"-DGGML_AVX2=ON", "-DGGML_AVX512=ON", "-DGGML_AVX512_VNNI=ON", "-DGGML_F16C=OFF"} <= set(options)
    assert not any("AMX" in option for option in options)
    assert ggml_options([], "aarch64") == ["-DGGML_NATIVE=ON"]
