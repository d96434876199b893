"""The parent feeds eight replicas, whose devices are stubs."""

from nanoinfer.bench.host import measure_replicas
from nanoinfer.bench.workloads import Load


def test_the_parent_feeds_eight_replicas_of_60_000_tokens_a_second_each() -> None:
    figures = measure_replicas(Load(512, (100, 1024), (100, 1024)), num_replicas=8)
    assert figures["tokens_per_second"] > 8 * 60_000
