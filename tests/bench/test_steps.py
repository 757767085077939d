"""`bench steps` on a tiny model: it runs every kind of step and says what kernels it ran."""

from tests.bench.conftest import Run


def test_every_step_has_a_line(bench: Run, small_reader: None) -> None:
    result = bench("steps", "--repeats", "1")
    assert result.exit_code == 0, result.output
    assert "reference kernels, 1 thread" in " ".join(result.stdout.split())
    for name in ("decode, 1 row", "decode, 8 rows", "prefill, 64 tokens, beside 7", "replan, 1 row"):
        assert any(line.strip().startswith(name) or f" {name}" in line for line in result.stdout.splitlines())
    assert " GB/s" in result.stdout.splitlines()[-1]
