"""Settings that must be in place before the first import of torch or numpy."""

import os

# Two cores are shared by the test process, its workers and the ranks that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
# No test may find traces that an earlier run left; those of the cache name a folder of their own.
os.environ["PRIMUS_EXT_CACHE"] = "off"
