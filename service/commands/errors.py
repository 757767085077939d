"""What a command raises where it cannot go on and no call has failed."""


class CommandError(Exception):
    """A command that cannot go on; `reason` is UPPER_SNAKE, `message` one sentence."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        self.message = message
        super().__init__(f"{reason}: {message}")
