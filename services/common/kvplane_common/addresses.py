"""Addresses, as host:port."""

import re
import socket

_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+(%\w+)?\]|[^\s:/\[\]]+):(?P<port>[^:\]]*)")
_PORT = re.compile(r"[0-9]{1,5}")


def check_address(address: str, *, port_zero: bool = False) -> str:
    """Return `address` if it is host:port, else raise ValueError that says what was wrong.

    IPv6 hosts stand in brackets. Port 0, for any free one, is only good with `port_zero`.
    """
    parts = _HOST_PORT.fullmatch(address)
    if parts is None:
        raise ValueError(f"{address!r} is not host:port")
    port, lowest = parts["port"], 0 if port_zero else 1
    if not _PORT.fullmatch(port) or not lowest <= int(port) <= 65535:
        raise ValueError(f"{address!r} has no port from {lowest} to 65535")
    return address


def check_bindable(address: str) -> None:
    """Raise OSError that says why this machine cannot listen on `address`, if it cannot.

    gRPC itself says only that it failed. The socket is closed again, so this is no reservation.
    """
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, _, _, where = found[0]
        with socket.socket(family, kind) as probe:
            # As servers do: an address whose last connections still linger is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {error.strerror or error}") from error


def with_port(address: str, port: int) -> str:
    """Return `address` with its port replaced."""
    return f"{address.rpartition(':')[0]}:{port}"
