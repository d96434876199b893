"""The numbers that a step returns in the place of a token id: operations write them, and the engine reads them."""

NO_TOKEN = -1  # of a row whose logits were NaN or infinite
NOT_COUNTED = -2  # of what was drawn after a wrong proposal
