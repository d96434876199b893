"""`nanoinfer bench images` reads pictures with a model of random weights, against the floor of both of its parts."""

import json
from pathlib import Path

import pytest

from nanoinfer.__main__ import main
from nanoinfer.bench import pictures


def test_pictures_are_read_once_and_found_in_the_cache_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL")
    monkeypatch.setattr(pictures, "find_device", lambda: "cpu")
    monkeypatch.setattr(pictures, "NUM_WARMING", 1)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "images", "--num-images", "3", "--json", str(tmp_path / "figures.json")])
    assert ended.value.code == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["first"]["images_per_second"] > 0
    assert figures["first"]["hits"] == 0
    assert figures["again"]["hits"] > 0.9
    assert all(seconds > 0 for seconds in figures["floor"].values())
    assert "3 pictures" in capsys.readouterr().out


def test_the_operations_of_a_tower_that_can_be_counted_by_hand() -> None:
    vision = {"hidden_size": 2, "intermediate_size": 3, "depth": 2, "in_channels": 1, "patch_size": 2}
    vision |= {"temporal_patch_size": 1, "spatial_merge_size": 2, "out_hidden_size": 5, "deepstack_visual_indexes": [0]}
    of_layer = 4 * 2 * 2 + 2 * 2 * 3  # q, k, v, o; both of the MLP
    attention = 2 * 8 * 8 * 2  # 8 patches with 8, 2 values of a head, queries with keys and then with values
    merger = 8 * 8 + 8 * 5
    assert pictures.tower_flops(vision, 8) == 2 * (8 * 4 * 2 + 2 * (8 * of_layer + attention) + 2 * merger * 2)


def test_eight_billion_have_the_operations_that_are_known_of_them() -> None:
    """A picture of 1,024 x 768 has 3,072 patches."""
    assert pictures.tower_flops(pictures.VISION, 3072) == pytest.approx(3.95e12, rel=0.01)
