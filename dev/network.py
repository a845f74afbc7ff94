"""Ports on which nobody listens."""

import contextlib
import socket


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Return distinct TCP ports that are free on the address now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((address, 0))
        return [int(one.getsockname()[1]) for one in sockets]


def accepts(address: str, port: int) -> bool:
    """Whether somebody accepts TCP connections there."""
    try:
        with socket.create_connection((address, port), timeout=1):
            return True
    except OSError:
        return False
