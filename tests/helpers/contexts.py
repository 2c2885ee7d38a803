"""Files of contexts, changed by one who knows the format."""

import json

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mmkv import digest


def rewrite(path, change):
    """Change tensors and header of a context's file, and sign it anew.

    Args:
        path: the file.
        change: is given both, and changes them; what it returns, if not None, is the header.
    """
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["mmkv-context"])
    tensors = load_file(path)
    del about["digest"]
    text = change(tensors, about)
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    if text is None:
        about["digest"] = digest.of_tensors(tensors, json.dumps(about, sort_keys=True))
        text = json.dumps(about)
    save_file(tensors, path, {"mmkv-context": text})
