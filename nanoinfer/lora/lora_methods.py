"""The methods of `LLM` that load and forget adapters."""

from nanoinfer.errors import ConfigError
from nanoinfer.lora.lora_request import LoRARequest
from nanoinfer.lora.registry import AdapterRegistry


class LoRAMethods:
    """Has the methods of `LLM` for adapters. `LLM` sets the field `adapters`, to None without enable_lora."""

    adapters: AdapterRegistry | None

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before a call names it; return False if it was loaded already. Other calls may run.

        Raises ModelError for a folder that cannot be served, RequestError where its id stands for another folder, and
        ConfigError without enable_lora.
        """
        return self._registry().add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter, by its lora_int_id; return whether it was loaded.

        The id may then stand for another folder, or for new files in the same folder. Raises EngineStateError while
        requests use the adapter, ConfigError without enable_lora.
        """
        return self._registry().remove(lora_id)

    def list_loras(self) -> set[int]:
        """Return the ids of the adapters that are loaded. Raises ConfigError without enable_lora."""
        return self._registry().ids()

    def _registry(self) -> AdapterRegistry:
        if self.adapters is None:
            raise ConfigError("this LLM was made without enable_lora=True; give that, for adapters")
        return self.adapters
