"""The `mpiquant` command; nothing imports it."""
