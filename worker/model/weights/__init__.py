"""Model files, read into checked values. Knows no forward pass."""
