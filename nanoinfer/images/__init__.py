"""Pictures in prompts: from what a user writes to token ids and tensors."""
