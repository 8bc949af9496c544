"""Methods side by side on one task, and the studies of the paper."""
