"""What tests share: tiny models, the masked reference, and stand-ins for a GPU.

Import it before transformers and Triton: they read the environment once.
"""

import os
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Processes that tests start compute as tests do, on one thread.
os.environ["OMP_NUM_THREADS"] = "1"
if shutil.which("nvidia-smi") is None:  # without a GPU Triton's kernels can be interpreted
    os.environ["TRITON_INTERPRET"] = "1"
