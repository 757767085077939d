"""`python -m worker`: reads its settings, then loads what they ask for."""

import sys

from pagecast._log import LogWriter, open_log
from worker.config import WorkerConfig, prepare_process

EXIT_NOT_INSTALLED = 6


def main(arguments: list[str]) -> int:
    """Run a worker until it is told to stop; returns the exit status."""
    config = WorkerConfig.load(arguments)
    prepare_process()
    try:
        # Not before: torch reads the environment when it is imported.
        from worker.process import run  # noqa: PLC0415
    except ModuleNotFoundError as error:
        hint = f"a worker needs {error.name}: pip install 'pagecast[worker]'"
        with LogWriter(sys.stderr.buffer) as writer:
            open_log(writer, config.log_level).error("worker_failed", error=hint)
        return EXIT_NOT_INSTALLED
    return run(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
