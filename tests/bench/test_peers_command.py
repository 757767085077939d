"""`bench peers` as a command: what it refuses before anything runs, what it chooses, how it ends."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench import cpu_commands, peers
from bench.__main__ import main
from bench.peer_cases import GROUPS, chosen_groups
from tests.bench.peer_fakes import Fakes


def test_groups_can_be_narrowed() -> None:
    assert [case.context for case in GROUPS[0].only({2048}).cases] == [2048, 2048]
    assert GROUPS[0].only(()) == GROUPS[0]
    assert len({group.name for group in GROUPS}) == len(GROUPS)


def test_the_command_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes(tmp_path, llama=("5",))
    made = []
    monkeypatch.setattr(
        peers, "Engines", lambda places, *rest: made.append((places.weights("Q8_0"), *rest)) or fakes
    )
    monkeypatch.setattr(cpu_commands, "unwind_on_sigterm", lambda: None)
    model, folder = tmp_path / "tiny.gguf", tmp_path / "all"
    model.touch()
    folder.mkdir()
    arguments = ["peers", "--model", str(model), "--folder", str(folder), "--rounds", "1", "--threads", "3"]
    arguments += ["--group", "Q4_0-int8", "--peer", "llama.cpp", "--kv-dtype", "int8"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert made == [(folder / "Q8_0.gguf", 3, "int8", folder / "logs")]
    assert result.stderr.splitlines()[0] == (
        "Q4_0-int8, 1 session, context 128: 2.50 ms; 1.25 x floor, 2.00 x llama.cpp"
    )
    assert "PASS" not in result.stdout
    result = CliRunner().invoke(main, [*arguments, "--check"])
    assert (result.exit_code, result.stdout.count("PASS Q4_0-int8, ")) == (0, 3)
    fakes.arguments["llama"] = ("2",)
    assert CliRunner().invoke(main, [*arguments, "--check"]).exit_code == 1


def _refused(*arguments: str) -> Result:
    """Of a command that has to end before anything runs."""
    return CliRunner().invoke(main, ["peers", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", "77"), "--context: no case has 77; cases have 128, 2048, 8000"),
        (
            ("--group", "Q4_0-int8", "--context", "128", "--context", "2048"),
            "--context: no case has 2048; cases have 128",
        ),
    ],
)
def test_a_context_of_no_case_is_refused(arguments: tuple[str, ...], message: str) -> None:
    result = _refused(*arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"error: {message}\n")


def test_groups_without_a_case_of_that_context_are_left_out() -> None:
    assert [group.name for group in chosen_groups((), (2048,))] == ["Q4_1-int8", "Q4_1-bfloat16"]
    assert chosen_groups((), ()) == list(GROUPS)


def test_a_folder_is_made_by_set_up_alone(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    result = _refused("--folder", str(wrong), "--check")
    assert result.exit_code == 1
    assert result.stderr == f"error: --folder: {wrong} is not there; run `pagecast bench peers --set-up`\n"
    assert not wrong.exists()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    result = _refused("--folder", str(file))
    assert result.exit_code == 2
    assert "'--folder'" in result.stderr
    assert "is a file" in result.stderr
    result = _refused("--folder", str(file / "below"), "--set-up")
    assert (result.exit_code, result.stderr) == (1, f"error: --folder: {file / 'below'}: Not a directory\n")


def test_a_command_without_a_model_is_one_line(tmp_path: Path) -> None:
    result = _refused("--folder", str(tmp_path), "--model", str(tmp_path / "no.gguf"))
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "error: no.gguf: no such file\n")
