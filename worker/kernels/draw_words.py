"""The words in which a draw's parameters travel to a device: one row of int32 a draw, one an entry. A leaf.

A pair of words that holds a float64 or an unsigned 64 bit number starts at an even word, low half first.
"""

DRAW_WORDS = 16
"""Words of a draw, 64 bytes."""

FLAGS = 0
"""`DRAWS`, `GREEDY`, `WANTS_LOGPROB`; 0: nothing is drawn for the row."""
SLOT = 1
"""Entry of `fed` that takes the id; negative: none does."""
FIRST_ENTRY = 2
"""Of the row, in the table of entries."""
NUM_ENTRIES = 3
"""Of the row."""
TOP_K = 4
"""Candidates kept; 0: all."""
POSITION = 5
"""Of the token to draw, in its log."""
SEED = 6
"""Unsigned, two words."""
TEMPERATURE = 8
"""Float32."""
MIN_P = 9
"""Float32."""
TOP_P = 10
"""Float64, as are the next."""
REPETITION = 12
"""Multiplies the logits of entries that are in the log, unless they are positive."""
INVERSE_REPETITION = 14
"""Multiplies those that are positive: a quotient of float64 would cost the device a call."""

DRAWS = 1
"""Flag: a token is drawn for the row."""
GREEDY = 2
"""Flag: the token is that of the largest logit."""
WANTS_LOGPROB = 4
"""Flag: its logprob is wanted."""

ENTRY_WORDS = 4
"""Words of an entry, 16 bytes: a token whose logit changes before the draw."""

TOKEN_ID = 0
"""No id twice in a row; without effect where it is not below the vocabulary's size."""
IN_LOG = 1
"""1: the repetition penalty covers the token; 0: it does not."""
OFFSET = 2
"""Float64 that is added after the penalty; -inf bans the token."""
