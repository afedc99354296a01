"""What the benchmarks measure: a linear layer, the ops of a step, a plain cast kernel as a yardstick."""
