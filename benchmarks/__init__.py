"""The parts of bench.py: what is run (workload), and how fast it could be (floor)."""
