"""Bytes of tensors in GGUF files; random valid ones for formats that the `gguf` package only decodes."""

from typing import Any, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

Array = np.ndarray[Any, Any]

# Kind -> a weight's standard deviation where the block's scale is 1 and all other bits are random, and the
# block's min in scales: so many that weights lie around 0.
_SPREAD: Final = {"Q4_K": (258.0, 7.5), "Q5_K": (520.0, 15.5), "Q6_K": (1370.0, None)}


def blocks_of(weights: Array, kind: GGMLQuantizationType, random: np.random.Generator) -> Array:
    """A tensor's bytes in a file.

    Args:
        weights: [N, K] float32; of Q4_K, Q5_K and Q6_K only each row's size is taken, the rest is random.
        kind: How it is to lie.
        random: For what is random.
    """
    if kind.name not in _SPREAD:
        return np.asarray(quantize(weights, kind))
    block, num_bytes = GGML_QUANT_SIZES[kind]
    num_rows, width = weights.shape
    raw = random.integers(0, 256, (num_rows, width // block, num_bytes), dtype=np.uint8)
    spread, min_scales = _SPREAD[kind.name]
    scales = (weights.std(axis=1) / spread).astype(np.float16)
    scales = np.repeat(scales[:, None], width // block, axis=1)
    if min_scales is None:
        raw[..., -2:] = scales[..., None].view(np.uint8)
    else:
        mins = scales * np.float16(min_scales)
        raw[..., :4] = np.stack([scales, mins], axis=-1).view(np.uint8)
    return raw.reshape(num_rows, -1)
