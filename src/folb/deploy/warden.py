"""A program of Flower's that ends with the deployment that started it, and answers only its own user.

    python -P -m folb.deploy.warden PROGRAM ARGUMENTS

Flower's Control API does not check who calls it. Any user of this machine could reach it on loopback, and make the
SuperLink run code as the SuperLink's owner. So every connection is looked up in the system's table, which has the user
at its other end. Also, a deployment that is killed cannot end its processes. So each process holds one end of a pipe,
and ends when the other end is closed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

TABLE = Path("/proc/net/tcp")  # of Linux
ESTABLISHED = "01"
STOP = 10.0  # seconds in which a program may end by itself


def command(program: str) -> list[str]:
    """The beginning of a command that runs a program under this module."""
    return [sys.executable, "-P", "-m", __name__, program]


@functools.cache
def lifeline() -> int:
    """The standard input for such a command: a pipe whose other end this process holds until it ends, or is killed."""
    return os.pipe()[0]


def knows_users() -> bool:
    """Whether this system says who is at the other end of a connection."""
    return TABLE.is_file()


def is_own(table: str, client: tuple[str, int], server: tuple[str, int], user: int) -> bool:
    """Whether the connection from `client` to `server` is that of `user`, by the system's table."""
    # the table has addresses as they lie in memory; a connection that its client has closed is root's there
    ends = [f"{struct.unpack('=I', socket.inet_aton(host))[0]:08X}:{port:04X}" for host, port in (client, server)]
    rows = [line.split() for line in table.splitlines()[1:]]
    return any(row[1:3] == ends and row[3] == ESTABLISHED and int(row[7]) == user and row[9] != "0" for row in rows)


def _admitted(scope: Any) -> bool:
    if scope["type"] == "lifespan" or not knows_users():
        return True
    with contextlib.suppress(OSError, ValueError, TypeError):
        return is_own(TABLE.read_text(), tuple(scope.get("client")), tuple(scope.get("server")), os.getuid())
    return False


def close_to_others() -> None:
    """Let every server of this process answer only this user."""
    import uvicorn

    load = uvicorn.Config.load

    def loaded(self: Any) -> None:
        load(self)
        app = self.loaded_app

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            if _admitted(scope):
                return await app(scope, receive, send)
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"only for the user who started it\n"})

        self.loaded_app = answer

    uvicorn.Config.load = loaded  # type: ignore[method-assign]


def end_with_the_other_end(pipe: int) -> None:
    """End this process once no process holds the other end of the pipe."""
    while os.read(pipe, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the program that the arguments name. Standard input is the pipe; the program gets none."""
    pipe = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=end_with_the_other_end, args=(pipe,), daemon=True).start()
    close_to_others()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
