"""Plain torch implementations: one per operator, row by row the same bits in any batch."""
