"""The kvplane command."""
