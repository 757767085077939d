"""Weights kept as a file quantises them, under the name that loaders know. The value is the kernels' own."""

from worker.kernels.quantised import GROUP, QUANT_KINDS, QuantisedMatrix, QuantKind

__all__ = ["GROUP", "QUANT_KINDS", "QuantKind", "QuantisedMatrix"]
