"""What scripts do with parameters and gradients, where each is on the ranks of its stages."""

from __future__ import annotations

from autoshard.runtime.stage_clipping import clip_over_stages
from autoshard.runtime.stage_mixing import mix_stages
from autoshard.runtime.stage_scaling import scale_over_stages
from autoshard.runtime.stage_states import states_of_all_stages
from autoshard.runtime.stage_tensors import complete_whole_values

__all__ = ["complete_stage_ops"]


def complete_stage_ops() -> None:
    """From now on, in this process: whole values, clipping, a gradient scaler and full state dicts are those of all
    stages. Nothing changes for other tensors. All ranks of a pipeline call such a function together."""
    complete_whole_values()
    mix_stages()
    clip_over_stages()
    scale_over_stages()
    states_of_all_stages()
