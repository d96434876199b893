"""What form a completion's text is to have: a stand-in with the fields alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoinfer.errors import RequestError

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """Says what form the text has, by one of KINDS."""

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        if sum(getattr(self, kind) is not None for kind in KINDS) != 1:
            raise RequestError(f"{self} must have one of {', '.join(KINDS)}; give just one")
