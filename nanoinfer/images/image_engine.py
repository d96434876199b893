"""Runs a model that reads images: gives the images of requests virtual token ids, and their contents to the runner."""

from array import array
from collections.abc import Iterator, Sequence, Set
from functools import partial
from itertools import takewhile
from typing import Any

from nanoinfer.config import EngineConfig
from nanoinfer.engine.engine import Recipient
from nanoinfer.engine.interfaces import FailedImages, Runner
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.proposer import Proposer
from nanoinfer.engine.request import Request
from nanoinfer.engine.sequence import Sequence as EngineSequence
from nanoinfer.engine.sequence import SequenceStatus
from nanoinfer.errors import RequestError
from nanoinfer.images.processed import ProcessedImage
from nanoinfer.images.virtual_ids import KnownImage, VirtualIds
from nanoinfer.images.whole_images import WholeImages
from nanoinfer.text.prompts import PreparedRequest


class ImageEngine(LLMEngine):
    """Runs requests with images. Scheduler, block manager and prefix cache see them as ordinary tokens.

    vocab_size: the first virtual id. The other arguments: see `LLMEngine`.
    """

    def __init__(self, config: EngineConfig, runner: Runner, *args: Any, vocab_size: int, **options: Any) -> None:
        self.virtual_ids = VirtualIds(vocab_size)
        if runner.limits.whole_images:
            self.block_manager_class = partial(WholeImages, self.virtual_ids)
        super().__init__(config, runner, *args, **options)
        self._images: dict[int, list[KnownImage]] = {}  # the images of unfinished requests, by request id

    def _queue(self, request_id: int, prepared: PreparedRequest, recipient: Recipient) -> Request:
        images, prepared.images = prepared.images, ()  # from now on this engine holds them
        try:
            if images:
                prepared.packed_ids = self._hold(request_id, prepared.token_ids, images)
            return super()._queue(request_id, prepared, recipient)
        except BaseException:
            self._release({request_id})
            raise

    def _hold(self, request_id: int, token_ids: list[int], images: Sequence[ProcessedImage]) -> bytes:
        """Hold the images of a request; return its token ids as int32, with virtual ids where the images stand."""
        self.virtual_ids.forget_idle(self._cached_tokens)
        ids = array("i", token_ids)
        self._images[request_id] = held = []
        for image in images:
            end = image.start + image.num_tokens
            known = self.virtual_ids.hold(image.key, tuple(token_ids[image.start : end]))
            held.append(known)
            ids[image.start : end] = array("i", known.ids)
            if known.num_users == 1:
                self.check_open().hold_image(known.first_id, known.token_ids, image.tensors, image.make_tensors)
        return ids.tobytes()

    def _cached_tokens(self) -> Iterator[bytes]:
        """Yield, in parts, the token ids of every text that may be found in the prefix cache, as int32."""
        yield from self.block_manager.pool.texts()
        if self.block_manager.state_group is not None:
            yield from self.block_manager.state_group.snapshots.texts()

    def _release(self, request_ids: Set[int]) -> None:
        """Release the images of requests that have ended."""
        held = [image for request_id in request_ids for image in self._images.pop(request_id, ())]
        unused = [image.first_id for image in held if self.virtual_ids.release(image)]
        if unused and self.runner is not None and not self.runner.closed:
            self.runner.drop_images(unused)

    def _launch(self) -> bool:
        is_launched = super()._launch()
        if is_launched and any(failed := self.check_open().take_failed_images()):
            self._end_failed(failed)
        return is_launched

    def _end_failed(self, failed: FailedImages) -> None:
        """End requests with an error if the model failed with an image of theirs, or with their positions."""
        ending: list[EngineSequence] = []
        rows = ((seq.request_id, seq.row) for seq in self.scheduler.running if seq.row is not None)
        of_rows = {request_id: failed.rows[row] for request_id, row in rows if row in failed.rows}
        for request_id, images in self._images.items():
            if request_id not in self._requests:
                continue
            wrong = next((number for number, image in enumerate(images) if image.first_id in failed.images), None)
            if wrong is not None:
                what = f"image {wrong} cannot be encoded ({failed.images[images[wrong].first_id]}); crop it"
            elif request_id in of_rows:
                what = f"the positions of its images cannot be counted ({of_rows[request_id]}); crop one"
            else:
                continue
            error = RequestError(f"{what}, or change its size", "invalid_image")
            for completion in self._requests[request_id].completions:
                if completion.seq.status is not SequenceStatus.FINISHED:
                    completion.seq.error = error
                    ending.append(completion.seq)
        self._collect_until(max_in_flight=0)
        unfinished = [seq for seq in ending if seq.status is not SequenceStatus.FINISHED]
        self.scheduler.abort({seq.seq_id for seq in unfinished})
        self._note_finished(unfinished)
        for seq in ending:
            seq.finish_reason = "error"
        self.reset_prefix_cache()  # it may have keys and values of these images

    def _finish_requests(self) -> None:
        try:
            super()._finish_requests()
        finally:
            self._release_ended()

    def _forget(self, dropped: Set[int]) -> None:
        super()._forget(dropped)
        self._release_ended()

    def _release_ended(self) -> None:
        if self._images and (ended := self._images.keys() - self._requests.keys()):
            self._release(ended)


class TextProposals:
    """Proposes what another proposer does, but stops before a virtual id, since no model draws one."""

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self._proposer, self._vocab_size = proposer, vocab_size
        self.max_num_tokens = proposer.max_num_tokens

    def waits(self, seqs: list[EngineSequence]) -> bool:
        return self._proposer.waits(seqs)

    def propose(self, seqs: list[EngineSequence]) -> list[list[int]]:
        return [[*takewhile(self._is_text, ids)] for ids in self._proposer.propose(seqs)]

    def _is_text(self, token_id: int) -> bool:
        return token_id < self._vocab_size
