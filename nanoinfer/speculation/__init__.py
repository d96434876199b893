"""Speculative decoding without a draft model: proposes tokens from texts that sequences repeat (`speculative_config`).

Read `speculator.py` first. It asks `drafts.py` what each sequence may go on with, `controller.py` whether proposals
pay, and `offers.py` which of them a step computes. `watch.py` keeps the cost low while they do not pay.
"""
