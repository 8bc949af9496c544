"""Hugging Face models, tokenized text, metrics of language models, and PEFT adapters."""
