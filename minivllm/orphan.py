"""What the kernel does to a child of ours whose parent has ended (Linux: PR_SET_PDEATHSIG), in whatever state it is.

Such a child ends by itself when its lifeline closes, and tidies up (child.py). That takes Python's lock and a process
that runs, so one that spins in an extension, or that somebody has stopped, would live on. It asks for two signals, each
in a thread of its own, as the kernel keeps one for a thread:

    SIGCONT  a process that was stopped goes on, and finds its lifeline closed
    SIGTRAP  its handler is the C library's alarm(), so that no Python is needed. It is called with the signal's number:
             five seconds later SIGALRM ends the process, if it has not ended by then

The kernel takes for the parent the *thread* that forked, prctl(2). `child.start` has one for that, which never ends.
"""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
_HAS_PRCTL = sys.platform == "linux"  # elsewhere the lifeline is all there is


def end_in_time() -> None:
    """To be called in a thread that lives as long as the process."""
    if _HAS_PRCTL:
        libc = ctypes.CDLL(None)
        libc.signal(ctypes.c_int(signal.SIGTRAP), ctypes.cast(libc.alarm, ctypes.c_void_p))
        _ask_for(signal.SIGTRAP)


def go_on() -> None:
    """Likewise, in another one."""
    if _HAS_PRCTL:
        _ask_for(signal.SIGCONT)


def _ask_for(number: signal.Signals) -> None:
    refused = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), *[ctypes.c_ulong(0)] * 3)
    assert not refused, number
