"""Worker API, version 1: generated stubs."""
