"""Ends a process without waiting for its threads; knows nothing of what they do."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def end_process(status: int) -> NoReturn:
    """Runs what was registered with `atexit` (temporary folders go, logs are flushed) and ends with `status`.

    The interpreter's own end waits for the threads of every pool, and one of them may be inside a request to an object
    store that takes half a minute to fail and is then sent again. Threads that it does not wait for can break it too:
    one that comes back from native code while it ends is unwound through that code, which aborts the process.
    """
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
