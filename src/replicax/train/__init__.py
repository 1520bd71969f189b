"""What does a training run need beyond a step? Checkpoints, and keeping the good ones."""
