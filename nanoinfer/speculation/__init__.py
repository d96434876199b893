"""Proposes what sequences go on with, from texts that they repeat (`speculative_config` of `LLM`)."""
