"""Takes a runner from its first to its last moment: loads the model, sizes the cache, sleeps, wakes up, closes.

While it is awake it holds a `ModelRunner`, which runs the steps. To sleep, it drops that one, whose memory on the
device is free then, and the weights leave the device. To wake up, it makes another.
"""

import gc
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import torch
from torch import Tensor

from nanoinfer.caches.routing_table import RoutingOnHost
from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.checkpoint.weights import ModelWeights
from nanoinfer.config import EngineConfig
from nanoinfer.device import computing, is_out_of_memory
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.interfaces import FailedImages, row_sizes
from nanoinfer.engine.packet import Packet
from nanoinfer.engine.token_masks import TokenMasks
from nanoinfer.errors import ConfigError, NanoinferError
from nanoinfer.layers.attention.metadata import DecodeBatch
from nanoinfer.lora.adapter_slots import RankAdapters
from nanoinfer.lora.adapter_weights import AdapterMatrices
from nanoinfer.models.images import ImageContent, MakeTensors
from nanoinfer.runner import memory
from nanoinfer.runner.cuda_graphs import DecodeGraphs, graph_sizes, several_tokens_graph_sizes, sharing_graph_sizes
from nanoinfer.runner.device_state import StepBuffers
from nanoinfer.runner.model_runner import LaunchedStep, ModelRunner, StepHandle
from nanoinfer.runner.setup import RunnerInfo, Setup
from nanoinfer.runner.stand_ins import packed_graph_sizes, usual_packed_keys
from nanoinfer.runner.step_images import HeldImages
from nanoinfer.runner.step_tables import PADDING_ROW


class DeviceRunner:
    """Holds the model on one device, and has a ModelRunner run its steps there.

    config: the user's options. model_config: the model's sizes. folder: the model's files.
    Raises ConfigError for an option that does not fit the device or the model, ModelError for the checkpoint.
    """

    def __init__(
        self, config: EngineConfig, model_config: BaseModelConfig, folder: Path, tp: TensorParallel | None = None
    ) -> None:
        self.tp = tp or TensorParallel()
        self.setup = Setup.of(config, model_config, self.tp)
        self.device = self.setup.device
        self._model_runner: ModelRunner | None = None  # None while the cache sleeps
        self.closed = False
        self.failure: NanoinferError | None = None  # an error of a step leaves it open
        self.sleeping_tags: frozenset[str] = frozenset()  # empty, {"kv_cache"}, or both "weights" and "kv_cache"
        self._sleep_level = 1  # of the last sleep
        self.adapters: RankAdapters | None = None  # with enable_lora
        self._held_images = HeldImages()
        self._memory_use: memory.MemoryUse | None = None  # of a GPU, as far as it was measured
        try:
            with computing(self.device, num_threads=None):
                self._set_up(folder)
        except memory.TooLittleMemoryError as error:
            raise ConfigError(f"{error}{self._explain_memory()}") from None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                f"{self.device} has too little memory for the model of {folder / 'config.json'} and the largest step "
                f"({error}); lower max_num_batched_tokens={config.max_num_batched_tokens} or max_num_seqs="
                f"{config.max_num_seqs}, free the memory that other programs hold, or use a smaller model"
                f"{self._explain_memory()}"
            ) from error

    @property
    def model_runner(self) -> ModelRunner:
        assert self._model_runner is not None, "a runner that sleeps, or is closed, has nothing on its device"
        return self._model_runner

    def launch(self, packet: Packet) -> LaunchedStep:
        """Start the forward pass of a step, up to its logits."""
        return self.model_runner.launch(packet)

    def sample(self, launched: LaunchedStep, masks: TokenMasks | None = None) -> StepHandle:
        """Draw the tokens of a launched step, as the masks allow."""
        return self.model_runner.sample(launched, masks)

    def wait(self, handle: StepHandle) -> list[int]:
        """Wait for the token ids of a sampled step and return them, row after row if rows have several tokens."""
        if handle.event is not None:
            handle.event.synchronize()
        return handle.token_ids.view(-1).tolist()

    def read_routed_experts(self, block_ids: list[int], start: int, end: int) -> RoutingOnHost:
        """Start to copy the experts of positions [start, end) to the host, for the sequence that has these blocks."""
        table = self.model_runner.state.routing_table
        assert table is not None, "nobody asked for routed experts when the engine was made"
        with computing(self.device, num_threads=None):
            return table.read(block_ids, start, end)

    def begin_reading(self, folder: Path) -> None:
        """Begin to read an adapter in a thread."""
        self._rank_adapters.begin_reading(folder)

    def read_adapter(self, folder: Path) -> AdapterMatrices:
        """Return what this rank keeps of an adapter. Raises ModelError for one that cannot be served."""
        return self._rank_adapters.read(folder)

    def keep_adapter(self, number: int, _folder: Path, matrices: AdapterMatrices) -> None:
        """Keep an adapter that `read_adapter` has read."""
        self._rank_adapters.keep(number, matrices)

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter that no request uses."""
        self._rank_adapters.drop(number)

    @property
    def _rank_adapters(self) -> RankAdapters:
        assert self.adapters is not None, "only an engine with enable_lora has adapters"
        return self.adapters

    def hold_image(
        self,
        image_id: int,
        token_ids: Sequence[int],
        tensors: Mapping[str, Tensor],
        make_tensors: MakeTensors | None = None,
    ) -> None:
        """Keep an image that packets will name by this id: see `ImageContent`."""
        self._held_images[image_id] = ImageContent(tuple(token_ids), tensors, make_tensors)

    def drop_images(self, image_ids: Sequence[int]) -> None:
        """Forget images that packets will not name any more."""
        for image_id in image_ids:
            del self._held_images[image_id]
        if self._model_runner is not None and self._model_runner.state.images is not None:
            self._model_runner.state.images.forget(image_ids)

    def take_failed_images(self) -> FailedImages:
        """Return where the model failed with images in launched steps; each failure once."""
        images = self.model_runner.state.images
        return FailedImages() if images is None else images.take_failed()

    def sleep(self, level: int) -> None:
        """Give the device's memory back: level 1 keeps the weights in host memory, level 2 drops them."""
        with computing(self.device, num_threads=None):
            if "weights" not in self.sleeping_tags:
                self.weights.leave_device(keep=level == 1)
                self._sleep_level = level
        self.sleeping_tags = frozenset(("weights", "kv_cache"))
        self._free_all_but_weights()

    def wake_up(self, tags: Set[str]) -> None:
        """Take the memory of "weights", then of the "kv_cache", and capture the graphs again, as `tags` say.

        If memory is short this raises, and all that slept before sleeps again.
        """
        slept = self.sleeping_tags
        try:
            with computing(self.device, num_threads=None):
                if "weights" in slept & tags:
                    self.weights.return_to_device()
                    self.sleeping_tags -= {"weights"}
                if "kv_cache" in slept & tags:
                    self._allocate(self.setup.allocate_buffers(self.model, self.limits))
                    self._capture_graphs(is_warm=True)
                    self.sleeping_tags -= {"kv_cache"}
        except BaseException:
            if "weights" in slept:
                self.sleeping_tags -= {"weights"}  # some of them may be awake
                self.sleep(self._sleep_level)
            self._free_all_but_weights()
            raise

    @property
    def unready_reason(self) -> str | None:
        """Why no step can run now, and what to do; None if one can."""
        if self.sleeping_tags == {"kv_cache"}:
            return "the KV cache of this engine sleeps; call wake_up(tags=['kv_cache']) first"
        return "this engine sleeps; call wake_up first" if self.sleeping_tags else self.weights.explain_missing()

    def close(self) -> None:
        """Give the device's memory back. The runner cannot be used any more; closing twice is fine."""
        if not self.closed:
            self.closed = True
            del self.model, self.weights
            self._free_all_but_weights()
            self.adapters = None

    def _set_up(self, folder: Path) -> None:
        """Load the model, size and allocate what steps need beside it, capture the graphs."""
        setup, started = self.setup, time.perf_counter()
        free_at_start = setup.free_at_start()
        self._memory_use = setup.memory_use(free_at_start) if setup.counts_memory else None
        self.model = setup.load_model(folder)
        self.weights, self._dense = ModelWeights(self.model), setup.load_dense()
        self._num_threads = setup.num_step_threads(self.model)
        self.adapters = setup.make_adapters(self.model)
        # See DeviceState.enter_proposals.
        packs_lines = self.model.packs_lines and self.adapters is None and self.model.image_encoder is None
        self.limits = setup.limits_without_cache(free_at_start, self.model.image_encoder, packs_lines)
        loaded = time.perf_counter()
        if setup.counts_memory:
            buffers, free_bytes = self._measure(free_at_start)
        else:
            buffers, free_bytes = setup.allocate_buffers(self.model, self.limits), memory.CPU_CACHE_BYTES
        self.limits = setup.limits_with_cache(self.limits, free_bytes)
        self._allocate(buffers)
        sized = time.perf_counter()
        self._capture_graphs()
        seconds = {"weights": loaded - started, "warm-up": sized - loaded, "graphs": time.perf_counter() - sized}
        description = setup.describe(self.model_runner.state.kv_cache, self.limits, self._num_threads)
        self.info = RunnerInfo(self.device, setup.dtype, description, seconds)

    def _measure(self, free_at_start: int) -> tuple[StepBuffers, int]:
        """Find out what is left for the cache, with smaller steps than by default where that is too little.

        Returns what such steps need whatever the size of the cache, and the bytes for the cache.
        """
        wanted = self.limits
        while True:
            try:
                measured = self._measure_steps(free_at_start)
            except (memory.TooLittleMemoryError, torch.OutOfMemoryError) as error:
                smaller = self.setup.smaller_steps(self.limits)
                if smaller is None or (self.tp.size > 1 and isinstance(error, torch.OutOfMemoryError)):
                    raise  # the other ranks have not run out, and would wait for this one
                self.limits = smaller
            else:
                memory.log_smaller_steps(wanted, self.limits)
                return measured
            self._free_all_but_weights()

    def _measure_steps(self, free_at_start: int) -> tuple[StepBuffers, int]:
        """Measure with these limits. Raises TooLittleMemoryError where smaller steps would leave more to the cache."""
        setup = self.setup
        buffers = setup.allocate_buffers(self.model, self.limits)
        self._allocate(buffers)
        self._memory_use = setup.measure_memory_use(self.model_runner, self.limits, free_at_start)
        free_bytes = self.tp.minimum(self._memory_use.free, self.device)  # so that all ranks go on alike
        if not setup.holds_enough(self.limits, free_bytes) and setup.smaller_steps(self.limits) is not None:
            raise memory.TooLittleMemoryError(f"{free_bytes} bytes hold too few tokens")
        return buffers, free_bytes

    def _explain_memory(self) -> str:
        """Return what an error of too little memory adds on a GPU: what takes the memory, and what would fit."""
        if self._memory_use is None:
            return ""
        from nanoinfer.runner.what_fits import explain

        try:
            model = self.model if hasattr(self, "model") else self.setup.model_without_weights()
        except RuntimeError:  # sizes beyond any address
            model = None
        return "" if model is None else f". {explain(self.setup, model, self._memory_use)}"

    def _allocate(self, buffers: StepBuffers) -> None:
        """Allocate the cache and the tables, and make the ModelRunner that uses them."""
        self._drop_model_runner()  # makes room, if there is one
        if self.device.type == "cuda":  # or a small tensor may take part of that room, and a large one finds none
            torch.cuda.empty_cache()
        self._model_runner = self.setup.make_model_runner(
            buffers, self.model, self._dense, self.limits, self._num_threads, self._held_images, self.adapters
        )

    def _capture_graphs(self, is_warm: bool = False) -> None:
        if self.setup.uses_graphs() and self.model.generates and self.model.captures_decode:
            runner, max_num_seqs = self.model_runner, self.limits.max_num_seqs
            sizes, sharing_sizes = graph_sizes(max_num_seqs), sharing_graph_sizes(max_num_seqs)
            least_free = 0 if self._memory_use is None else self._memory_use.step
            graphs = DecodeGraphs(
                runner.decode, sizes, sharing_sizes, self.device, is_warm=is_warm, least_free=least_free
            )
            for num_tokens in row_sizes(self.limits.max_row_tokens):  # compiles what larger batches need, too
                row = torch.full((1,), PADDING_ROW, dtype=torch.int32, device=self.device)
                graphs.replay(DecodeBatch(row, None, num_tokens, torch.ones_like(row)))
            if self.limits.packs_lines and self.limits.max_row_tokens > 1:
                for key in usual_packed_keys(packed_graph_sizes(sizes), self.limits.max_row_tokens):
                    graphs.capture(key, is_late=True)  # a user's num_kvcache_blocks may leave no memory for it
            runner.state.decode_graphs = graphs
            if runner.state.adapters is not None:
                sizes = several_tokens_graph_sizes(sizes)  # fewer, as they are captured while requests wait
                with_adapters = DecodeGraphs(
                    runner.decode, sizes, sharing_sizes, self.device, late=True, least_free=least_free
                )
                runner.state.graphs_by_use = graphs, with_adapters

    def _drop_model_runner(self) -> None:
        runner, self._model_runner = self._model_runner, None
        if runner is not None:
            runner.close()
            if self.adapters is not None:
                self.adapters.free_slots()

    def _free_all_but_weights(self) -> None:
        self._drop_model_runner()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
