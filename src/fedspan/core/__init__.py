"""The vocabulary of all other packages: methods, rounds, vectors, messages, seeds, bytes."""
