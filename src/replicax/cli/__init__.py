"""What do I type? The `replicax` command."""
