"""The convergence theory of SSF as instruments: bounds, step sizes, estimates, forecasts, and measurements in a run."""
