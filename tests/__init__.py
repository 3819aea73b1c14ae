"""The tests. What torch shall know is set here, before anything imports it: later it would not be read."""

import os

# Test processes share the cores: a second thread of torch's in each would only wait for the other's, and burn its core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
