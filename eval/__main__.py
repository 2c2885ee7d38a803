"""`python -m mmkv.eval SUITE ...` is `mmkv eval SUITE ...`; `accelerate launch` wants a module."""

import sys

from .cli import commands

if __name__ == "__main__":
    commands(args=["eval", *sys.argv[1:]], prog_name="mmkv")
