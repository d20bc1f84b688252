"""Cuts a Hugging Face causal language model into stages and runs it chunk by chunk."""
