"""Build the model of a config at its first step, and set up its devices."""

from __future__ import annotations

import os
import warnings

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from stickymoe.errors import ConfigError
from stickymoe.models.gpt import GPT
from stickymoe.runs.config import RunConfig
from stickymoe.training.processor import disable_missing_amx
from stickymoe.variants import Site


def make_accelerator(config: RunConfig) -> Accelerator:
    """Device, precision and processes of a run."""
    accelerator = Accelerator(mixed_precision="bf16" if config.train.precision == "bf16" else "no")
    if config.train.precision == "bf16" and accelerator.device.type == "cpu":
        disable_missing_amx()
    if accelerator.num_processes > 1 and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        _set_up_fsdp(accelerator)
    return accelerator


def _set_up_fsdp(accelerator: Accelerator) -> None:
    """FSDP2 as accelerate's configuration asks for it, in fp32: autocast rounds what is multiplied, but no gate."""
    state = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:  # where accelerate ignores FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    version = state.fsdp_plugin.fsdp_version
    if version != 2:
        raise ConfigError(f"fsdp_version: got {version}, expected 2. Set it in accelerate's configuration.")
    state.fsdp_plugin.mixed_precision_policy = None
    # Keys and values are views, and nothing is done to them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def build_model(config: RunConfig, vocab_size: int) -> GPT:
    """The model of a run at its first step; a function of the config and the seed."""
    torch.manual_seed(config.seed)
    c = config.model
    try:
        return GPT(
            c,
            vocab_size,
            lambda layer: config.variant.parts(Site(layer, c.d_model, c.pool_size, c.top_k, vocab_size)),
        )
    except RuntimeError as e:
        if "allocate" not in str(e):
            raise
        sizes = f"n_layers {c.n_layers}, n_experts {c.n_experts}, d_model {c.d_model} and d_ff {c.d_ff}"
        raise ConfigError(f"model: got {sizes}, whose weights do not fit in memory; make one of them smaller.") from e
