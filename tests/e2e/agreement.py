"""Equal ids, as far as rounding lets two implementations agree.

A margin is the distance of the two largest logits. Where it is below a bound, another order of
additions may pick the other token and equality ends; given the expected ids up to that point, the
ids have to agree again from the next position on.
"""

from collections.abc import Callable, Sequence

Generate = Callable[[list[int], int], list[int]]


def assert_ids_agree(
    generate: Generate,
    prompt_ids: Sequence[int],
    expected: Sequence[int],
    margins: Sequence[float],
    *,
    min_margin: float,
) -> None:
    """Check greedy ids after a prompt.

    Args:
        generate: Greedy continuation of some ids by a number of tokens.
        prompt_ids: What comes before.
        expected: Ids of the other implementation.
        margins: Its margin at each of them.
        min_margin: Where the margin is at least this, the ids must be equal.
    """
    start = 0
    while start < len(expected):
        ids = generate([*prompt_ids, *expected[:start]], len(expected) - start)
        where = start + next(
            (n for n, pair in enumerate(zip(ids, expected[start:], strict=False)) if pair[0] != pair[1]),
            len(ids),
        )
        if where < len(expected):
            assert margins[where] < min_margin, f"position {where}: margin {margins[where]}"
        start = where + 1
