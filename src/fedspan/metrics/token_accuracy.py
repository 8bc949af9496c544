"""Token accuracy: the share of tokens that a language model or tagger predicts right."""

from __future__ import annotations

from dataclasses import dataclass

from fedspan.core.registry import register
from fedspan.metrics.accuracy import Accuracy


@register
@dataclass(eq=False)
class TokenAccuracy(Accuracy):
    """Right tokens / tokens that count."""
