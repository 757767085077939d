"""Decode plans: traced, lowered and held, or made anew for every step."""
