"""Token accuracy: the share of tokens that a language model or tagger predicts right."""

from __future__ import annotations

from fedspan.core.registry import register
from fedspan.metrics.accuracy import Accuracy


@register
class TokenAccuracy(Accuracy):
    """Right tokens / tokens that count."""
