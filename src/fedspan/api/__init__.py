"""What users call: fit, run, and the spec that both are made of."""
