"""Settings of the test process itself."""

import os

# As in a worker: threads that wait must not spin while other tests' processes want the core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
