"""Connects nanoinfer to tools that people already use; a bridge to a library needs an extra of its own."""
