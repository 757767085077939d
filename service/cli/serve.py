"""`pagecast serve`: flags and environment to settings, and on to the gateway."""

import sys
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

import click
from click.core import ParameterSource

from pagecast._log import LogWriter, open_log
from service.cli.options import PLAN_CHOICE, Decorator, options_of
from service.cli.running import settings_errors, variable
from service.config import ServeSettings, unknown_variables

_PREFIX = variable("--")
_LEVELS = click.Choice(["debug", "info", "warning", "error"], case_sensitive=False)
_DEVICES = click.Choice(["auto", "cpu", "cuda"], case_sensitive=False)
_KERNELS = click.Choice(["auto", "native", "reference", "triton"], case_sensitive=False)
_WEIGHTS = click.Choice(["auto", "file", "float32", "float16", "bfloat16"], case_sensitive=False)
_ACTIVATIONS = click.Choice(["auto", "float32", "int8", "bfloat16"], case_sensitive=False)
_KV_DTYPES = click.Choice(
    ["auto", "float32", "float16", "bfloat16", "int8", "float8_e4m3fn"], case_sensitive=False
)


def _option(flag: str, field: str | None = None, **attributes: Any) -> Decorator:
    """An option of `serve` for the field of that name of ServeSettings; shows the field's default."""
    name = field or flag.removeprefix("--").replace("-", "_")
    default = ServeSettings.model_fields[name].default
    return click.option(flag, name, default=default, show_default=True, **attributes)


def _seconds(flag: str, text: str) -> Decorator:
    field = flag.removeprefix("--").replace("-", "_") + "_s"
    return _option(flag, field, type=float, metavar="SECONDS", help=text)


@click.command()
@_option("--model", metavar="SPEC", help="A known model's name or a path to a GGUF file.")
@_option("--workers", type=int, help="Worker processes to start.")
@_option("--listen", metavar="HOST:PORT", help="Address of the public API; port 0 takes a free one.")
@_option(
    "--worker-address",
    "worker_addresses",
    multiple=True,
    metavar="ADDR",
    help="Use this running worker and start none; repeatable.",
)
@_option(
    "--device",
    type=_DEVICES,
    help="Where workers compute. auto: cuda where there is such a device that the kernels can use, else cpu.",
)
@_option(
    "--kernels",
    type=_KERNELS,
    help="Kernels of the workers. auto: on cuda triton; on cpu native where it is installed and suits the "
    "model, else reference.",
)
@_option(
    "--weights",
    type=_WEIGHTS,
    help="What matrices are kept as. file: as the file has them. auto: file, where the kernels take it.",
)
@_option(
    "--activations",
    type=_ACTIVATIONS,
    help="What products are made of. auto: int8 with native kernels and quantised weights.",
)
@_option(
    "--kv-dtype",
    type=_KV_DTYPES,
    help="What keys and values are kept as. auto: 16 bits, but float32 with reference kernels.",
)
@_option("--decode-plan", type=PLAN_CHOICE, metavar="[once|replan]", help="Plan of sessions that name none.")
@_option("--kv-blocks", type=int, help="KV blocks per worker. Absent: what the worker chooses.")
@_option("--max-step-tokens", type=int, help="Tokens of one step. Absent: what the worker chooses.")
@_option(
    "--max-replan-sessions", type=int, help="Open sessions per worker whose plan is built for every step."
)
@_option(
    "--threads", type=int, help="Compute threads per worker. Absent: the CPUs, shared among the workers."
)
@_option("--pin-threads", is_flag=True, help="Keep each compute thread on a CPU of its own.")
@_option(
    "--numa",
    is_flag=True,
    help="Keep each worker on one NUMA node; as many workers as nodes, or a multiple by --workers.",
)
@_seconds("--start-timeout", "How long workers may take until they serve.")
@_seconds("--worker-timeout", "A worker that answers nothing for so long is lost.")
@_seconds("--step-timeout", "So is one whose step takes longer.")
@_seconds("--drain-timeout", "How long running turns may go on after SIGTERM.")
@_option("--log-level", type=_LEVELS, help="Least severe level that is logged.")
@click.pass_context
def serve(context: click.Context, /, **flags: Any) -> None:
    """Run the gateway and its workers until SIGTERM or Ctrl-C.

    Every option can also be set as PAGECAST_<NAME>, e.g. PAGECAST_KV_BLOCKS; a flag wins.
    """
    # The client commands must start without the server's imports.
    from service.server import serve as run  # noqa: PLC0415

    given = {
        name: value
        for name, value in flags.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    with settings_errors():
        settings = ServeSettings(**given)
    known = _known_variables(context)
    if unknown := unknown_variables(known):
        meant = {name: nearest for name in unknown if (nearest := _nearest(name, known))}
        with LogWriter(sys.stderr.buffer) as writer:
            log = open_log(writer, settings.log_level)
            log.warning("unknown_variables", variables=unknown, did_you_mean=meant)
    sys.exit(run(settings))


def _nearest(name: str, known: Collection[str]) -> str | None:
    """The variable that was probably meant."""
    # Without what all of them begin with, which alone would make any two alike.
    names = {other.removeprefix(_PREFIX): other for other in sorted(known)}
    found = get_close_matches(name.upper().removeprefix(_PREFIX), names, n=1, cutoff=0.75)
    return names[found[0]] if found else None


def _known_variables(context: click.Context) -> set[str]:
    """Those of `serve`, and those that the client commands take."""
    own = {variable(option.opts[0]) for option in options_of(context.command)}
    others = (option.envvar for option in options_of(context.find_root().command))
    return own | {name for name in others if isinstance(name, str)}
