"""The registry: which nodes there are, and which of them live."""
