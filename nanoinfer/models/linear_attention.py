"""Linear attention in the place of a decoder layer's attention."""

from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.gated_delta_net import GatedDeltaNet
from nanoinfer.layers.linear import PartialSum
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.ops.common.fp8_format import Activations


class DecoderLinearAttention(GatedDeltaNet):
    """Linear attention and the products before and after it. index: which part of the step's states it takes."""

    def __init__(self, config: ModelConfig, index: int, is_interleaved: bool, tp: TensorParallel) -> None:
        assert config.linear_attention is not None, "the config says which layers have linear attention"
        super().__init__(config.hidden_size, config.rms_norm_eps, config.linear_attention, is_interleaved, tp)
        self.index = index

    def forward(self, hidden: Activations, step: ForwardStep) -> PartialSum:
        assert step.recurrent_states is not None, "a model with linear attention gets states with each step"
        assert step.rows is not None, "a model with linear attention gets the rows of the states with each step"
        return self.compute(hidden, step.rows, step.positions, step.attention, step.recurrent_states.layer(self.index))
