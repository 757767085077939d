"""Settings of the test process itself."""

import os
import signal

# As in a worker: threads that wait must not spin while other tests' processes want the core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Before gRPC is imported: its core would write lines of its own between the tests' dots.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# A job that a shell runs in the background starts with Ctrl-C ignored, and so would the processes that
# tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
