"""Channels to the other services."""

import grpc

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""Largest gRPC message that any service sends or takes, in bytes."""

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # gRPC takes the longer of the two, and this one is a minute if nothing is said.
    ("grpc.http2.ping_timeout_ms", 5_000),
    # Else an idle watch would soon be looked after once a minute only.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A peer that died and came back under the same address must not share a dead connection.
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy for the way out must not carry what the services say to each other.
    ("grpc.enable_http_proxy", 0),
)


def dial(address: str) -> grpc.aio.Channel:
    """Return a channel to `address` (host:port). It connects when it is first used."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)
