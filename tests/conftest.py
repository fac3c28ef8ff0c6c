"""Set before torch is imported anywhere: bit-equality needs a fixed number of threads."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
