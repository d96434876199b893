"""Defines numbers that stand for a token id in a step's results: operations write them, and the engine reads them."""

NO_TOKEN = -1  # of a row whose logits were NaN or infinite
NOT_COUNTED = -2  # of what was drawn after a wrong proposal
