"""The gateway: takes sessions and streams, routes them to workers. Never imports torch."""
