"""`python -m worker`: reads its settings, opens its log, then loads what they ask for."""

import sys

import click

from worker.config import WorkerConfig, is_spawned, prepare_process

EXIT_NOT_LOADED = 1
EXIT_NOT_INSTALLED = 6


def main(arguments: list[str]) -> int:
    """Run a worker until it is told to stop; returns the exit status."""
    prepare_process()
    # Not before: gRPC reads the environment when it is imported.
    from pagecast._process_log import process_log  # noqa: PLC0415

    try:
        config = WorkerConfig.load(arguments)
    except click.ClickException as error:
        if is_spawned(arguments):
            with process_log("info") as log:
                log.error("worker_failed", error=error.format_message())
        else:
            error.show()
        return error.exit_code
    with process_log(config.log_level) as log:
        try:
            # Not before: torch reads the environment too, and brings log handlers.
            from worker.process import run  # noqa: PLC0415
        except ModuleNotFoundError as error:
            hint = "install the extra `worker`, in the repository with pip install '.[worker]'"
            log.error("worker_failed", error=f"a worker needs {error.name}: {hint}")
            return EXIT_NOT_INSTALLED
        except Exception as error:  # a library that is there and does not load
            log.error("worker_failed", error=f"{type(error).__name__}: {error}", exc_info=error)
            return EXIT_NOT_LOADED
        return run(config, log)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
