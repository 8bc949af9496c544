"""The vocabulary every other part speaks: rounds, vectors, messages, seeds, bytes."""
