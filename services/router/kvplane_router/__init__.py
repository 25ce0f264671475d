"""The router: where the first token comes soonest."""
