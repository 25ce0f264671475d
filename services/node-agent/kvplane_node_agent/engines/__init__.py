"""The engines that a node agent can stand in front of, one adapter a file."""
