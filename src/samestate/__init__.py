"""Proof that an LLM server's reused state is the state it would have computed."""

__version__ = "0.1.0"
