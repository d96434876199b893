"""The fields of a config.json: what is read of them, and how a wrong value is refused."""

from typing import Any

import pytest

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.errors import ModelError


def test_an_absent_field_and_null_have_the_default_and_an_architecture_has_its_own() -> None:
    fields = Fields({"a": None, "b": 3}, defaults={"c": 5, "d": 7})
    assert [fields.int(name, 1) for name in "abcde"] == [1, 3, 5, 7, 1]
    assert Fields({"a": None}, defaults={"a": 1}).optional_int("a") is None, "null is said"
    assert fields.optional_int("d") == 7
    assert fields.get("a", 1) is None
    assert fields.get("e", 1) == 1
    assert Fields({"d": None}, defaults={"d": 7}).float("d", 1) == 7.0


@pytest.mark.parametrize(
    ("read", "value", "rule"),
    [
        (Fields.int, "4", "it must be a whole number of at least 1"),
        (Fields.int, True, "it must be a whole number of at least 1"),
        (Fields.int, 0, "it must be a whole number of at least 1"),
        (lambda fields, name: fields.int(name, least=0), -1, "it must be a whole number of at least 0"),
        (Fields.float, 0, "it must be a positive number"),
        (Fields.float, False, "it must be a positive number"),
        (Fields.float, [1.0], "it must be a positive number"),
        (Fields.flag, 1, "it must be true or false"),
        (Fields.part, [1], "it must be a JSON object"),
        (lambda fields, name: fields.choice(name, ("x", "y")), "z", "supported are x, y"),
    ],
)
def test_a_wrong_value_is_refused_with_its_file_its_name_and_the_rule(read: Any, value: Any, rule: str) -> None:
    with pytest.raises(ModelError) as error:
        read(Fields({"size": value}, source="some.json"), "size")
    assert str(error.value) == f"some.json has size={value!r}; {rule}"


@pytest.mark.parametrize(("name", "value"), [("size", 2**25), ("num_hidden_layers", 5000), ("eps", 1e31)])
def test_a_value_beyond_any_model_is_refused(name: str, value: float) -> None:
    with pytest.raises(ModelError, match="beyond any model; download it again"):
        (Fields.float if name == "eps" else Fields.int)(Fields({name: value}), name)


def test_what_the_engine_would_have_to_ignore_is_refused() -> None:
    fields = Fields({"a": None, "b": 1.0, "c": 0.5})
    for name in "ab":
        fields.must_be(name, 1.0)
    with pytest.raises(ModelError, match=r"has c=0\.5, which is not supported; use a model without it"):
        fields.must_be("c", 1.0)


def test_layers_are_of_the_kinds_that_layer_types_names() -> None:
    kinds = {"full_attention": 1, "sliding_attention": 2}
    assert Fields({"layer_types": ["sliding_attention", "full_attention"]}).layers(2, kinds) == (2, 1)
    assert Fields({}).layers(2, kinds) is None
    for wrong in (["full_attention"], ["full_attention", "x"], [["x"], 3], "full_attention"):
        with pytest.raises(ModelError, match="must name full_attention or sliding_attention for each of 2 layers"):
            Fields({"layer_types": wrong}).layers(2, kinds)


def test_what_is_read_is_noted_by_its_path_wherever_it_stands() -> None:
    whole = Fields({"dtype": "x", "id2label": {"0": "a"}, "part": {"dtype": "y", "size": 1, "rope": {"base": 2}}})
    part = whole.part("part").with_others(whole, ["dtype", "absent"])
    assert (part.get("dtype"), part.int("size"), part.part("rope").int("base")) == ("x", 1, 2)
    whole.get("id2label")
    read = [("dtype",), ("part", "size"), ("part", "rope", "base"), ("id2label",), ("id2label", "0")]
    assert [whole.is_read(path) for path in read] == [True] * 5
    assert not any(whole.is_read(path) for path in [("size",), ("part", "dtype"), ("part", "rope", "x")])
