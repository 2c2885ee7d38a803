"""What tests share: tiny models, the masked reference, and stand-ins for a GPU.

Import it before transformers: that reads the environment once.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Processes that tests start compute as tests do, on one thread.
os.environ["OMP_NUM_THREADS"] = "1"
