"""An exponential moving average of weights."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


class WeightAverage:
    """Averaged copies of weights, in fp32.

    The decay grows to its final value over the first updates, so that the random start is soon forgotten.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.weights: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Adds the weights after step number `step`, counted from 1."""
        keep = min(self.decay, (1 + step) / (10 + step))
        for name, value in weights.items():
            if name in self.weights:
                self.weights[name].lerp_(value.detach().float(), 1 - keep)
            else:
                self.weights[name] = value.detach().float().clone()

    def save(self, path: Path) -> None:
        """Writes the averages."""
        save_file(self.weights, path)

    def load(self, path: Path, device: torch.device) -> None:
        """Reads what `save` wrote."""
        self.weights = load_file(path, device=str(device))
