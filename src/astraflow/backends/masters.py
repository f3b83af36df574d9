"""The weights that learn: fp32 masters with their gradients and AdamW moments, beside what the model computes in."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.adamw import adamw

from astraflow.errors import WeightsRefused
from astraflow.trainer.settings import TrainerSettings

EPSILON = 1e-8
PARTS = ("master", "moment1", "moment2")


class Masters:
    """One fp32 tensor a parameter. If the model computes in fp32, its own parameters are the masters."""

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], *, compute: torch.dtype, exact: Collection[str] = ()
    ) -> None:
        """``parameters``: fp32 ones by name; all but those in ``exact`` are cast to ``compute`` in place here."""
        self._model = {name: each for name, each in parameters if each.requires_grad}
        self.tensors: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self._moment1: dict[str, Tensor] = {}
        self._moment2: dict[str, Tensor] = {}
        self._count = torch.zeros((), dtype=torch.float32)
        for name, parameter in self._model.items():
            self.tensors[name] = parameter.data
            if compute is not torch.float32 and name not in exact:
                parameter.data = parameter.data.to(compute)
            self.gradients[name] = torch.zeros_like(self.tensors[name])
            self._moment1[name] = torch.zeros_like(self.tensors[name])
            self._moment2[name] = torch.zeros_like(self.tensors[name])
            parameter.register_post_accumulate_grad_hook(self._collector(name))  # type: ignore[no-untyped-call]
        self._collected: set[str] = set()

    @property
    def steps(self) -> int:
        """Optimiser updates in these weights."""
        return int(self._count)

    def _collector(self, name: str) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self.collect(name, parameter.grad)
                parameter.grad = None

        return collect

    def collect(self, name: str, gradient: Tensor) -> None:
        """Add to the fp32 gradient: the first of a step overwrites, which saves a pass over memory."""
        if name in self._collected:
            self.gradients[name].add_(gradient)
        else:
            self.gradients[name].copy_(gradient)
            self._collected.add(name)

    def collect_rows(self, name: str, index: Tensor, gradient: Tensor) -> None:
        """As ``collect``, of the rows ``index`` of a matrix alone: the dense gradient is never made."""
        if name not in self._collected:
            self.gradients[name].zero_()
            self._collected.add(name)
        self.gradients[name].index_add_(0, index, gradient.float())

    def drop_gradients(self) -> None:
        self._collected.clear()

    def gradient_norm(self) -> float:
        """Global 2-norm of what was collected; NaN or infinity if any gradient is."""
        found = [self.gradients[name] for name in self._model if name in self._collected]
        if not found:
            return 0.0
        norms = torch._foreach_norm(found)  # one pass, no temporary
        return float(torch.stack(list(norms)).double().norm())

    def update(self, settings: TrainerSettings, *, lr: float, norm: float) -> None:
        """One AdamW step with the gradients scaled to ``clip_norm``; then the model computes with the new weights."""
        scale = 1.0
        if settings.clip_norm and norm > settings.clip_norm:
            scale = norm / settings.clip_norm
        self._count += 1
        for names, decay in self._by_decay(settings.weight_decay):
            for name in names:
                if name not in self._collected:
                    self.gradients[name].zero_()
            device = self.tensors[names[0]].device
            adamw(
                [self.tensors[n] for n in names],
                [self.gradients[n] for n in names],
                [self._moment1[n] for n in names],
                [self._moment2[n] for n in names],
                [],
                [(self._count - 1).to(device) for _ in names],  # the call advances them itself
                fused=True,
                grad_scale=torch.tensor(scale, device=device) if scale != 1.0 else None,
                amsgrad=False,
                beta1=settings.betas[0],
                beta2=settings.betas[1],
                lr=lr,
                weight_decay=decay,
                eps=EPSILON,
                maximize=False,
            )
        self._collected.clear()
        self.push()

    def _by_decay(self, decay: float) -> list[tuple[list[str], float]]:
        """Matrices decay; norms and biases do not."""
        matrices = [n for n, t in self.tensors.items() if t.ndim >= 2]
        vectors = [n for n, t in self.tensors.items() if t.ndim < 2]
        return [(names, own) for names, own in ((matrices, decay), (vectors, 0.0)) if names]

    @torch.no_grad()
    def push(self) -> None:
        """Masters → the model, rounded to what it computes in."""
        for name, parameter in self._model.items():
            if parameter.data_ptr() != self.tensors[name].data_ptr():
                parameter.copy_(self.tensors[name])

    def save(self, folder: Path, *, prefix: str = "") -> None:
        for part, tensors in zip(PARTS, (self.tensors, self._moment1, self._moment2), strict=True):
            save_file(tensors, folder / f"{prefix}{part}.safetensors", {"steps": str(self.steps)})

    def load(self, folder: Path, *, steps: int, prefix: str = "") -> None:
        """Raises WeightsRefused when names or shapes differ; then nothing has changed."""
        loaded = [load_file(folder / f"{prefix}{part}.safetensors") for part in PARTS]
        for part, found in zip(PARTS, loaded, strict=True):
            shapes = {name: tuple(each.shape) for name, each in found.items()}
            if shapes != {name: tuple(each.shape) for name, each in self.tensors.items()}:
                raise WeightsRefused(
                    f"{folder}: {prefix}{part}.safetensors is of another model (names or shapes differ)"
                )
        for found, own in zip(loaded, (self.tensors, self._moment1, self._moment2), strict=True):
            for name, each in found.items():
                own[name].copy_(each)
        self._count.fill_(steps)
        self._collected.clear()
        self.push()


def is_finite(*values: float) -> bool:
    return all(math.isfinite(value) for value in values)
