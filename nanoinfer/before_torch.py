"""Runs before PyTorch is imported: sets how its threads wait, and notes when imports began. Needs nothing else."""

import os
import sys
import time


class ImportSeconds:
    """Says how long the imports took. The first engine takes it, for its log."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def end(self) -> None:
        self._seconds["imports"] = time.perf_counter() - self._started

    def take(self) -> dict[str, float]:
        """Return {"imports": seconds}, and nothing from the second time on."""
        taken, self._seconds = self._seconds, {}
        return taken


def shorten_spinning() -> None:
    """Have PyTorch's threads on a CPU sleep soon, unless the user says how they wait.

    They wait for each other hundreds of times a step, by spinning. Where other programs have the cores, one that spins
    keeps the one that it waits for from running. OpenMP reads this once, when it is loaded.
    """
    if "torch" not in sys.modules and {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}.isdisjoint(os.environ):
        os.environ["GOMP_SPINCOUNT"] = "20000"  # turns until it sleeps instead; 300,000 if nobody says


import_seconds = ImportSeconds()
shorten_spinning()
