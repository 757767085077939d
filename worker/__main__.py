"""`python -m worker`: reads its settings, then loads what they ask for."""

import sys

from worker.config import WorkerConfig, prepare_process


def main(arguments: list[str]) -> int:
    """Run a worker until it is told to stop; returns the exit status."""
    config = WorkerConfig.load(arguments)
    prepare_process()
    # Not before: torch reads the environment when it is imported.
    from worker.process import run  # noqa: PLC0415

    return run(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
