"""The convergence theory of SSF as tools: conditions, step sizes, bounds, estimates and diagnostics."""
