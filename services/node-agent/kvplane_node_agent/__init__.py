"""The node agent: the truth beside the GPU."""
