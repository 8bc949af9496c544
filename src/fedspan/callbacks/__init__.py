"""What follows a run while it goes on: one file per callback."""
