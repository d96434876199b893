"""How a call names an adapter, as in vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nanoinfer.errors import RequestError
from nanoinfer.option_fields import is_whole_number

EXAMPLE = "use LoRARequest('name', 1, 'path/to/folder'), say"


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Names an adapter of peft, LoRA, for the prompts of a call.

    lora_name: a name for messages, and for the lines of files. lora_int_id: a whole number from 1 on that stands for
    the adapter; until `remove_lora` it stands for the same folder. lora_path: the folder that peft has saved, with
    adapter_config.json and adapter_model.safetensors. Raises RequestError for other values.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise RequestError(f"lora_name={self.lora_name!r} is no text; {EXAMPLE}")
        if not is_whole_number(self.lora_int_id) or not 1 <= self.lora_int_id < 2**31:
            raise RequestError(f"lora_int_id={self.lora_int_id!r} is no whole number from 1 to {2**31 - 1}; {EXAMPLE}")
        if not isinstance(self.lora_path, str | Path) or not str(self.lora_path):
            raise RequestError(f"lora_path={self.lora_path!r} is no path; {EXAMPLE}")
        object.__setattr__(self, "lora_int_id", int(self.lora_int_id))
        object.__setattr__(self, "lora_path", str(Path(self.lora_path)))  # "folder/" is the same as "folder"


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None  # for all prompts of a call, or one for each
