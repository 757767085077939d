"""Token ids to text deltas. Knows bytes and UTF-8, no vocabulary and no sessions."""

import codecs
from collections.abc import Callable


class Detokenizer:
    """Decodes one generation's ids as they come.

    The deltas and `finish()` concatenate to `b"".join(token_bytes(id)).decode("utf-8", "replace")` of all
    ids: a character whose bytes are spread over tokens is held back until it is whole, bytes that can't
    become one turn into U+FFFD.

    Args:
        token_bytes: Bytes of a token id; empty for control tokens.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Takes the next id; returns the text that became certain, often empty."""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """Ends the generation; returns what was held back, as U+FFFD."""
        return self._decoder.decode(b"", final=True)
