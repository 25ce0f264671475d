"""How the metastore remembers a node: one key for each, written by the registry alone."""

from kvplane.common.v1 import node_pb2
from kvplane.metastore.v1 import metastore_pb2
from kvplane_common.keys import cache_prefix, node_key
from kvplane_common.metastore import delete, delete_prefix, put


def same_record(known: node_pb2.Node | None, node: node_pb2.Node) -> bool:
    """Tell whether `node` is remembered already: its capacity and load may differ."""
    return known is not None and (
        known.address == node.address
        and known.epoch == node.epoch
        and dict(known.labels) == dict(node.labels)
    )


def operations(node_id: str, node: node_pb2.Node | None) -> list[metastore_pb2.Operation]:
    """Return the changes that remember `node`, or that forget `node_id` where it is None.

    What a forgotten node had cached goes with it: its agent is not there to remove it.
    """
    if node is None:
        return [delete(node_key(node_id)), delete_prefix(cache_prefix(node_id))]
    record = node_pb2.Node()
    record.CopyFrom(node)
    record.ClearField("load")
    record.ClearField("lease_expire_time")
    return [put(node_key(node_id), record.SerializeToString())]


def parse(value: bytes) -> node_pb2.Node:
    """Return the node of a record. Raises google.protobuf.message.DecodeError for a broken one."""
    return node_pb2.Node.FromString(value)
