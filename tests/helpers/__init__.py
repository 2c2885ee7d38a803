"""What tests share: tiny models, the masked reference, and stand-ins for a GPU.

Import it before transformers: that reads the environment once.
"""

import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
