"""What tests share: tiny models, the masked reference, and stand-ins for a GPU.

Import it before transformers: that reads the environment once.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
