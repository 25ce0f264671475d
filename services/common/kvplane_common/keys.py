"""The keys of the metastore's records: where each writer puts what the others follow."""

NODE_PREFIX = b"/node/"
CACHE_PREFIX = b"/cache/"
SESSION_PREFIX = b"/session/"


def node_key(node_id: str) -> bytes:
    """Return the key of a node; the registry writes it."""
    return NODE_PREFIX + node_id.encode()


def cache_prefix(node_id: str) -> bytes:
    """Return the prefix of the keys of all cached prompts of a node."""
    return CACHE_PREFIX + f"{node_id}/".encode()


def cache_key(node_id: str, model: str, digest: bytes) -> bytes:
    """Return the key of a cached prompt, named by its chain's last digest; its agent writes it."""
    return cache_prefix(node_id) + f"{model}/{digest.hex()}".encode()
