"""Hugging Face models and PEFT adapters: what training them costs, and ways to and from adapters."""
