"""replicax: write a training step once, for one replica, and run it on any placement of devices."""
