"""Text from arguments and standard input, or one line on what is wrong with it and exit code 2."""

import sys
from collections.abc import Iterator

from service.cli.running import fail


def given_text(argument: str) -> str:
    """TEXT, or what standard input holds where it is "-"; ends the process where that is none."""
    if argument == "-":
        return "".join(input_lines()) or fail("TEXT: standard input is empty", exit_code=2)
    if (position := bad_character(argument)) is not None:
        fail(f"TEXT: not UTF-8 at character {position}", exit_code=2)
    return argument or fail("TEXT: it is empty", exit_code=2)


def input_lines() -> Iterator[str]:
    """Standard input, line by line, newlines included; ends the process where that is no text."""
    if sys.stdin is None:
        fail("TEXT: standard input is closed", exit_code=2)
    position = 0
    try:
        for line in sys.stdin.buffer:
            yield line.decode()
            position += len(line)
    except UnicodeDecodeError as error:
        fail(f"TEXT: standard input is not UTF-8 at byte {position + error.start}", exit_code=2)
    except OSError as error:
        fail(f"TEXT: standard input cannot be read: {error.strerror}", exit_code=2)


def bad_character(value: str) -> int | None:
    """Position of the first character that stands for a byte that is no text; None: there is none."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
