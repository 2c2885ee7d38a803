"""A program that a test starts, and the processes that this one forks."""

import os
import signal
import subprocess
from contextlib import suppress


def exit_code(command, seconds, **options):
    """Run a program; return its exit code, or None if it did not end within so many seconds.

    It has a process group of its own, which is killed at the end.
    """
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
