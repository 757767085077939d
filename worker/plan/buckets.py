"""The sizes that launch lists are made for. Knows numbers only."""

from typing import NamedTuple


class Bucket(NamedTuple):
    """What a launch list has room for; it always computes all of it.

    Attributes:
        num_tokens: Tokens.
        num_rows: Rows, and tokens that logits are computed of.
    """

    num_tokens: int
    num_rows: int


def buckets_of(*, max_step_tokens: int, max_step_rows: int) -> tuple[Bucket, ...]:
    """Powers of two up to `max_step_tokens`, and that itself, ascending.

    A row has a token or more, so a step of n tokens has at most n rows. Twice as many tokens as are live are
    computed at worst; up to a tile of the products they cost nothing, since weights are what is read.

    Raises:
        ValueError: A number is below 1.
    """
    for name, most in (("max_step_tokens", max_step_tokens), ("max_step_rows", max_step_rows)):
        if most < 1:
            raise ValueError(f"{name}={most} is below 1")
    sizes = [1 << power for power in range((max_step_tokens - 1).bit_length())]
    return tuple(Bucket(size, min(size, max_step_rows)) for size in (*sizes, max_step_tokens))


def bucket_for(buckets: tuple[Bucket, ...], num_tokens: int) -> Bucket:
    """The smallest of ascending `buckets` that a step of `num_tokens` fits.

    Raises:
        ValueError: It fits none.
    """
    for bucket in buckets:
        if num_tokens <= bucket.num_tokens:
            return bucket
    raise ValueError(f"num_tokens={num_tokens} is over {buckets[-1].num_tokens}, the largest bucket")
