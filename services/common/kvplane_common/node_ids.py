"""Names of nodes."""

import re

NODE_ID_RULE = "1 to 63 characters of a-z, 0-9, '.', '-' and '_'"
_NODE_ID = re.compile(r"[a-z0-9._-]{1,63}")
_ILLEGAL = re.compile(r"[^a-z0-9._-]")


def check_node_id(node_id: str) -> str:
    """Return `node_id` if it is legal, else raise ValueError that says what is."""
    if not _NODE_ID.fullmatch(node_id):
        raise ValueError(f"node id {node_id[:80]!r} is not {NODE_ID_RULE}")
    return node_id


def legal_node_id(name: str) -> str:
    """Return `name` with what a node id must not have replaced or cut off; "node" for nothing."""
    return _ILLEGAL.sub("-", name.lower())[:63] or "node"
