"""Data sets, archives and partitions."""
