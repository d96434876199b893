"""Speculative decoding without a draft model: proposes tokens from texts that sequences repeat (`speculative_config`).

An answer that has just copied some tokens of its prompt may copy those after them, too:

    prompt           the quick brown fox jumps over the lazy dog
    answer so far    the quick brown
    draft            fox jumps over       what followed "the quick brown" in the prompt

One decode step computes the newest token and the proposals, which are the draft or its beginning. It draws a token
after each of these four:

    computes         brown   fox     jumps   over
    draws            fox     jumps   onto    ...

The first two proposals are equal to what was drawn in their places, and the third is not. So "fox jumps onto" counts,
three tokens of one step, and the last draw is dropped.

Read `speculator.py` first. It asks `drafts.py` what each sequence may go on with (`text_index.py` looks it up),
`controller.py` whether proposals pay, and `offers.py` which of them a step computes. `watch.py` keeps the cost low
while they do not pay.
"""
