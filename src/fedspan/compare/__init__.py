"""Methods side by side on one task: each tuned on its own small grid, same seeds, judged by round and by byte."""
