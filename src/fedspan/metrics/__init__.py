"""Metrics of an evaluation, one file each; the file name is the name in a spec and in `fit(metrics=[...])`.

They are built on torchmetrics, which is imported when a metric that needs it is computed.
"""
