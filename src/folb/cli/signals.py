"""Ctrl-C, and the end of a process."""

from __future__ import annotations

import _thread
import argparse
import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from folb.cli.ctrl_c import interrupted

AGAIN = 0.02  # seconds


def _collecting(frame: FrameType | None) -> bool:
    """Whether jax's function for garbage collection is running."""
    while frame is not None and frame.f_code.co_name != "_xla_gc_callback":
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end the process while jax is imported: its compiled parts lose an exception, or crash.

    During garbage collection Python calls a function of jax, and functions of weak references, and drops exceptions
    that are raised there. So Ctrl-C is then sent again a moment later.
    """
    collecting = False

    def note(phase: str, about: Any) -> None:
        nonlocal collecting
        collecting = phase == "start"

    def interrupt(number: int, frame: Any) -> None:
        if collecting or _collecting(frame):
            threading.Timer(AGAIN, _thread.interrupt_main).start()
            return
        if getattr(getattr(sys.modules.get("jax"), "__spec__", None), "_initializing", False):
            interrupted(number, frame)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    usual = before in (signal.default_int_handler, interrupted)  # not if somebody ignores it, as nohup does
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    gc.callbacks.append(note)
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        gc.callbacks.remove(note)


def leave(options: argparse.Namespace, code: int) -> int:
    """The exit code. One of several processes ends at once instead, because the others are waiting for it."""
    if getattr(options, "process", None) is not None:
        sys.stderr.flush()
        os._exit(code)
    return code


def how_to_resume(options: argparse.Namespace) -> str:
    """The last words of an interrupted command. It sets `going` while there is something to resume."""
    return f"; resume with: {options.going}" if getattr(options, "going", None) else ""
