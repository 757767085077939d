"""`python -m bench …`: what can be measured."""

import os

import click

from worker.config import prepare_process


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure Pagecast."""
    prepare_process()


@main.command()
@click.option("--model", default="smollm2-135m", show_default=True, help="Model spec.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=lambda: len(os.sched_getaffinity(0)),
    help="For kernels. [default: the CPUs]",
)
@click.option("--repeats", type=click.IntRange(min=1), default=11, show_default=True, help="Of each step.")
def steps(model: str, threads: int, repeats: int) -> None:
    """Time single steps in process, beside the floor."""
    # Not before: torch reads the environment when it is imported.
    from bench.steps import measure  # noqa: PLC0415

    measure(model, threads, repeats)


if __name__ == "__main__":
    main()
