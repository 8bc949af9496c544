"""Scikit-learn's digits, which are in its package."""

from __future__ import annotations

from fedspan.data.sets import DataSet

SET = DataSet(
    name="digits",
    about="handwritten digits, 1,500 and 297 images of 8 × 8",
    clients="none of its own",
    licence="CC BY 4.0",
    source="https://archive.ics.uci.edu/dataset/80",
    size=0,
    package="sklearn",
    install="pip install 'fedspan[vision]'",
)
