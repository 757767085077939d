"""`pagecast plan`, also `python -m worker.plan`: what a model's plan is made of."""

import sys
from pathlib import Path

import click

from worker.plan.command_line import PictureFailed, PictureFile, Program, require_packages


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Look at decode plans."""


@main.command()
@click.option("--model", default="smollm2-135m", show_default=True, help="Model spec.")
@click.option(
    "--before", is_flag=True, help="The step before the passes, too; with --dot, that one is drawn."
)
@click.option("--max-step-tokens", type=click.IntRange(1, 65536), default=64, show_default=True)
@click.option("--max-step-rows", type=click.IntRange(1, 4096), help="[default: 32, at most the tokens]")
@click.option(
    "--dot",
    type=PictureFile(".svg", ".png", ".dot"),
    metavar="FILE",
    help="Write a picture: .svg or .png (by Graphviz), or .dot.",
)
def show(
    model: str, *, before: bool, max_step_tokens: int, max_step_rows: int | None, dot: Path | None
) -> None:
    """Print a model's step, the passes, the program and its arena; reads no weights."""
    if max_step_rows is not None and max_step_rows > max_step_tokens:
        raise click.UsageError("--max-step-rows is over --max-step-tokens")
    require_packages()
    # Not before: --help must not wait for torch.
    from worker.model.config import ModelFileError  # noqa: PLC0415
    from worker.model.weights.gguf import resolve_model_spec  # noqa: PLC0415
    from worker.plan.dot import dot_of, require_graphviz, write  # noqa: PLC0415
    from worker.plan.outline import calls_of, sections_of  # noqa: PLC0415
    from worker.plan.show import model_of_shapes, plan_of, text_of  # noqa: PLC0415

    max_step_rows = max_step_rows or min(32, max_step_tokens)
    try:
        if dot is not None:
            require_graphviz(dot)
        llama = model_of_shapes(resolve_model_spec(model))
        shown = plan_of(llama, max_step_tokens=max_step_tokens, max_step_rows=max_step_rows)
        click.echo("\n".join(text_of(shown, with_before=before)))
        if dot is not None:
            calls = calls_of(shown.before if before else shown.after)
            write(dot, dot_of(sections_of(calls), calls))
    except (ModelFileError, PictureFailed) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
