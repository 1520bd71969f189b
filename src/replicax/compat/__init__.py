"""What was it called before? Names of older releases, as thin fronts over the same engine."""
