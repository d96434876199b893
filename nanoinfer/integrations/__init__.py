"""Bridges to the tools that people already use. Each needs an extra of its own, and nothing else imports them."""
