"""What is told of a run while it goes on."""
