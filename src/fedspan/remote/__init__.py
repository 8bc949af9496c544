"""Runs across machines: the messages of a round, and the two ends of any transport that carries them."""
