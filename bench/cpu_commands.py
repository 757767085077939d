"""`pagecast bench decode`, `ops` and `peers`: steps on a CPU, where their time goes, and other engines."""

import sys
from pathlib import Path
from typing import Any

import click

from bench.command_line import CHECK, JSON, MAX_THREADS, fail, load, setting_options, unwind_on_sigterm
from bench.peer_cases import GROUPS, PEERS, chosen_groups
from worker.config import default_threads

_AT_LEAST_1 = click.IntRange(min=1)


@click.command()
@setting_options
@click.option("--sessions", type=_AT_LEAST_1, multiple=True, default=(1, 4, 16), show_default=True,
              help="That decode at once, at the first context; repeatable.")  # fmt: skip
@click.option("--context", "contexts", type=_AT_LEAST_1, multiple=True, default=(128, 2048, 8000),
              show_default=True, help="Tokens of prompt; repeatable. Others than the first are for the "
              "first number of sessions.")  # fmt: skip
@click.option("--prompt", "prompts", type=_AT_LEAST_1, multiple=True, default=(128, 2048), show_default=True,
              help="Tokens whose first token is timed; repeatable.")  # fmt: skip
@click.option("--tokens", type=_AT_LEAST_1, default=32, show_default=True, help="Per session and round.")
@click.option("--rounds", type=_AT_LEAST_1, default=7, show_default=True, help="Medians are over them.")
@click.option("--through", type=click.Choice(["process", "grpc"]), default="process", show_default=True,
              help="grpc: gateway, worker and a client process of its own, beside in process.")  # fmt: skip
@CHECK
@JSON
def decode(*, through: str, check: bool, as_json: bool, **given: Any) -> None:
    """Time decode steps and first tokens beside the floor, or through gRPC."""
    unwind_on_sigterm()
    names = ("sessions", "contexts", "prompts", "tokens", "rounds")
    sizes = {name: given.pop(name) for name in names}
    bench = load(**given)
    from rich.console import Console  # noqa: PLC0415

    from bench import decode_report as reports  # noqa: PLC0415
    from bench.decode import Wish, measure  # noqa: PLC0415
    from bench.floor import Reader  # noqa: PLC0415
    from bench.peer_engines import EngineFailed  # noqa: PLC0415
    from bench.served import Served, measure_served  # noqa: PLC0415
    from bench.server_process import ServerError  # noqa: PLC0415

    wish = Wish(**sizes)
    console = Console(stderr=True, highlight=False, quiet=as_json)
    found: Any
    try:
        if through == "grpc":
            flags = [
                text
                for name in ("model", "kernels", "weights", "activations", "kv_dtype", "threads")
                for text in (f"--{name.replace('_', '-')}", str(given[name]))
            ]
            found = measure_served(bench, wish, flags, console)
        else:
            found = measure(bench, wish, Reader(bench.num_threads))
    except (ValueError, ArithmeticError, EngineFailed, ServerError) as error:
        fail(error)
    checks = None
    if check:
        is_served = isinstance(found, Served)
        checks = reports.served_checks(found) if is_served else reports.floor_checks(found, _promised(bench))
    setting = given | sizes | bench.numbers
    sys.exit(0 if reports.say(bench.title, setting, found, checks, as_json=as_json) else 1)


def _promised(bench: Any) -> str | None:
    """Which floor these numbers promise to keep to; None of others."""
    if bench.activations == "int8":
        return "int8"
    return "float32" if bench.weights == "float32" else None


@click.command()
@setting_options
@click.option("--sessions", type=click.IntRange(min=0), default=1, show_default=True, help="That decode.")
@click.option("--context", type=_AT_LEAST_1, default=128, show_default=True, help="Tokens of each of them.")
@click.option("--prefill", type=click.IntRange(min=0), default=0, show_default=True,
              help="Tokens of a prompt that are computed in the same step.")  # fmt: skip
@click.option("--runs", type=_AT_LEAST_1, default=25, show_default=True, help="Medians are over them.")
@JSON
def ops(*, sessions: int, context: int, prefill: int, runs: int, as_json: bool, **given: Any) -> None:
    """Show where a step's time goes, operator by operator."""
    bench = load(**given)
    if bench.kernels.name != "native":
        fail(ValueError(f"operators are timed on native kernels, these are {bench.kernels.name}"))
    from bench.floor import Reader  # noqa: PLC0415
    from bench.ops import profile  # noqa: PLC0415
    from bench.ops_report import say  # noqa: PLC0415

    sizes = {"sessions": sessions, "context": context, "prefill": prefill, "runs": runs}
    try:
        found = profile(bench, Reader(bench.num_threads), **sizes)
    except ValueError as error:
        fail(error)
    title = f"{bench.title}: {sessions} decoding at {context}, {prefill} tokens of a prompt"
    say(title, given | sizes | bench.numbers, found, as_json=as_json)


@click.command()
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), default=".run/peers",
              show_default=True, help="Where peers and their weights are.")  # fmt: skip
@click.option(
    "--set-up", is_flag=True, help="Put them there first, each in an environment of its own; then compare."
)
@click.option("--model", default="smollm2-135m", show_default=True, help="Our file, of Q4_1.")
@click.option("--group", "groups", type=click.Choice([group.name for group in GROUPS]), multiple=True,
              help="Weights and our activations; repeatable.  [default: all]")  # fmt: skip
@click.option(
    "--peer", "peers", type=click.Choice(list(PEERS)), multiple=True, help="Repeatable.  [default: all]"
)
@click.option("--context", "contexts", type=_AT_LEAST_1, multiple=True,
              help="Only cases of this context or prompt; repeatable.  [default: all]")  # fmt: skip
@click.option("--rounds", type=_AT_LEAST_1, default=7, show_default=True, help="Medians are over them.")
@click.option("--threads", type=click.IntRange(1, MAX_THREADS), help="Of every engine.  [default: the CPUs]",
              default=default_threads)  # fmt: skip
@click.option("--kv-dtype", type=click.Choice(["auto", "float32", "float16", "bfloat16", "int8"]),
              default="auto", show_default=True, help="Ours; peers keep their own defaults.")  # fmt: skip
@CHECK
@JSON
def peers(
    *,
    folder: Path,
    set_up: bool,
    model: str,
    groups: tuple[str, ...],
    peers: tuple[str, ...],
    contexts: tuple[int, ...],
    rounds: int,
    threads: int,
    kv_dtype: str,
    check: bool,
    as_json: bool,
) -> None:
    """Run the same cases on other engines and on ours, in turn."""
    from bench import peer_setup, peers_report  # noqa: PLC0415
    from bench.peer_engines import EngineFailed  # noqa: PLC0415
    from bench.peers import Engines, Places, compare  # noqa: PLC0415
    from worker.model.config import ModelFileError  # noqa: PLC0415
    from worker.model.weights.gguf import resolve_model_spec  # noqa: PLC0415

    unwind_on_sigterm()
    try:
        chosen = chosen_groups(groups, contexts)
        _prepare_folder(folder, set_up=set_up)
    except ValueError as error:
        fail(error)

    def tell(line: str) -> None:
        click.echo(line, err=True)

    try:
        places = Places(folder.absolute(), resolve_model_spec(model).absolute())
        if set_up:
            for line in peer_setup.set_up(places, lambda what: tell(f"setting up {what}")):
                tell(f"not set up: {line}")
        comparison = compare(
            chosen,
            [PEERS[peer] for peer in peers or PEERS],
            rounds,
            Engines(places, threads, kv_dtype, folder / "logs"),
            lambda found: tell(peers_report.line_of(found)),
        )
    except (ModelFileError, EngineFailed) as error:
        fail(error)
    is_kept = peers_report.report(comparison, threads=threads, rounds=rounds, check=check, as_json=as_json)
    sys.exit(0 if is_kept else 1)


def _prepare_folder(folder: Path, *, set_up: bool) -> None:
    """Makes the peers' folder where they are set up; raises ValueError where it can't be, or is not there."""
    if set_up:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--folder: {folder}: {error.strerror}") from error
    elif not folder.is_dir():
        raise ValueError(f"--folder: {folder} is not there; run `pagecast bench peers --set-up`")
