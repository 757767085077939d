"""The picture of `python -m bench plan --plot`: what each token took in both modes."""

from collections.abc import Sequence
from pathlib import Path

from bench.loading import counted
from bench.plan import Comparison
from worker.batch import DecodePlan
from worker.plan.command_line import PictureFailed


def draw(path: Path, comparisons: Sequence[Comparison], title: str) -> None:
    """Write a PNG: for each number of sessions and mode, every token's time with the plan's part on top.

    Raises:
        PictureFailed: The file can't be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  an extra's
    from matplotlib.figure import Figure  # noqa: PLC0415  so too

    figure = Figure(figsize=(9, 0.8 + 2.6 * len(comparisons)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    grid = figure.subplots(len(comparisons), len(DecodePlan), sharex=True, sharey="row", squeeze=False)
    for row, comparison in zip(grid, comparisons, strict=True):
        for axes, plan in zip(row, DecodePlan, strict=True):
            arm = comparison.arms[plan]
            running = [total - planning for total, planning in zip(arm.total_ms, arm.plan_ms, strict=True)]
            tokens = range(1, len(arm.total_ms) + 1)
            axes.bar(tokens, running, width=1.0, color="#4477aa", label="run")
            axes.bar(tokens, arm.plan_ms, width=1.0, bottom=running, color="#ee7733", label="plan and bind")
            axes.set_title(
                f"{plan.name}, {counted(comparison.num_sessions, 'session')}: "
                f"median {arm.ms_per_token:.1f} ms, of it plan {arm.plan_ms_per_token:.2f}",
                fontsize="small",
            )
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel("ms per token")
    for axes in grid[-1]:
        axes.set_xlabel("token")
    grid[0][0].legend(frameon=False, fontsize="small")
    try:
        figure.savefig(path, format="png", dpi=140)
    except OSError as error:
        raise PictureFailed(f"{path}: {error.strerror}") from error
