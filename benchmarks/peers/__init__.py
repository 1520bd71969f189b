"""The same training steps in replicax and in what people use instead, each in a process of its own."""
