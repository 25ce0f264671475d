"""The metastore: what the cluster remembers, on disk."""
