"""The parts of bench.py: what is run (workload), how fast it could be (floor), where the time goes (host, timeline)."""
