"""Differential privacy: what clients clip, what the server adds, and what a run has spent."""
