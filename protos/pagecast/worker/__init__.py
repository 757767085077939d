"""Worker API: generated stubs."""
