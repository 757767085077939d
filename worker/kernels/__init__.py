"""Kernels: operators of the decode step and their implementations."""
