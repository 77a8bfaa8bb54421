"""Settings that must be in place before the first import of torch or numpy."""

import os

# Two cores are shared by the test process, its workers and the ranks that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
