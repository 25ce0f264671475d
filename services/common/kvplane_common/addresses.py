"""Addresses, as host:port."""


def check_address(address: str, *, port_zero: bool = False) -> str:
    """Return `address` if it is host:port, else raise ValueError that says what was wrong.

    IPv6 hosts stand in brackets. Port 0, for any free one, is only good with `port_zero`.
    """
    host, colon, port = address.rpartition(":")
    lowest = 0 if port_zero else 1
    if not colon or not host or (":" in host and not (host[0] == "[" and host[-1] == "]")):
        raise ValueError(f"{address!r} is not host:port")
    if not port.isascii() or not port.isdigit() or not lowest <= int(port) <= 65535:
        raise ValueError(f"{address!r} has no port from {lowest} to 65535")
    return address


def with_port(address: str, port: int) -> str:
    """Return `address` with its port replaced."""
    return f"{address.rpartition(':')[0]}:{port}"
