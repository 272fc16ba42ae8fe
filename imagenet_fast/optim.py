"""SGD and LARS over lists of tensors, updated together by torch's multi-tensor operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from imagenet_fast import recipe

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


class MomentumSGD:
    """SGD with momentum: v <- mu v + g + wd w; w <- w - lr v, as ``torch.optim.SGD``.

    The rate stays outside the momentum buffer, so a change of rate takes effect at once on what the buffer
    holds (the momentum correction of Goyal et al., arXiv 1706.02677). ``plain`` parameters are not decayed.
    """

    def __init__(
        self,
        decayed: Sequence[Tensor],
        plain: Sequence[Tensor],
        momentum: float,
        nesterov: bool,
        weight_decay: float,
    ) -> None:
        self._decayed = list(decayed)
        self._plain = list(plain)
        self._momentum = momentum
        self._nesterov = nesterov
        self._weight_decay = weight_decay
        self._velocity = {p: torch.zeros_like(p) for p in self.params}

    @property
    def params(self) -> list[Tensor]:
        """Everything it updates."""
        return [*self._decayed, *self._plain]

    @torch.no_grad()
    def step(self, lr: float, found_inf: Tensor | None = None) -> None:
        """Update every parameter from ``p.grad``; where ``found_inf`` is 1, change nothing at all."""
        self._descend(self._decayed, lr, self._weight_decay, found_inf)
        self._descend(self._plain, lr, 0.0, found_inf)

    def _descend(self, params: Sequence[Tensor], lr: float, weight_decay: float, found_inf: Tensor | None) -> None:
        if not params:
            return
        sgd(
            list(params), gradients(params), [self._velocity[p] for p in params],
            fused=True, grad_scale=None, found_inf=found_inf, weight_decay=weight_decay, momentum=self._momentum,
            lr=lr, dampening=0.0, nesterov=self._nesterov, maximize=False,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": list(self._velocity.values())}


class LARS(MomentumSGD):
    """Layer-wise adaptive rate scaling (You et al., arXiv 1708.03888), in the form MLPerf trains with.

    Each decayed tensor's step is scaled by its trust ratio, eta |w| / (|g| + wd |w| + eps), or 1 where either
    norm is zero; plain ones (biases, norm layers) take SGD's step. With ``clip`` the layer's rate is instead
    min(lr, (1 - mu) eta |w| / |g|): NVIDIA Caffe's LARC.

    Uses up the gradients it is given. Norms are taken in fp32 of whatever ``p.grad`` holds, so gradients must
    already be averaged and unscaled.
    """

    def __init__(
        self, decayed: Sequence[Tensor], plain: Sequence[Tensor], momentum: float, weight_decay: float,
        trust_coefficient: float, epsilon: float, clip: bool,
    ) -> None:  # fmt: skip
        super().__init__(decayed, plain, momentum, nesterov=False, weight_decay=weight_decay)
        self._eta = trust_coefficient
        self._epsilon = epsilon
        self._clip = clip

    @torch.no_grad()
    def step(self, lr: float, found_inf: Tensor | None = None) -> None:
        if self._decayed:
            grads = gradients(self._decayed)
            ratios = self.trust_ratios(lr).unbind()
            torch._foreach_add_(grads, self._decayed, alpha=self._weight_decay)
            torch._foreach_mul_(grads, ratios)
            self._descend(self._decayed, lr, 0.0, found_inf)
        self._descend(self._plain, lr, 0.0, found_inf)

    def trust_ratios(self, lr: float) -> Tensor:
        """The multiple of ``lr`` at which each decayed tensor is stepped, fp32 [tensors], on their device."""
        weight = torch.stack(torch._foreach_norm(self._decayed))
        grad = torch.stack(torch._foreach_norm(gradients(self._decayed)))
        if self._clip:
            ratio = ((1 - self._momentum) * self._eta * weight / (lr * grad)).clamp(max=1.0)
        else:
            ratio = self._eta * weight / (grad + self._weight_decay * weight + self._epsilon)
        return torch.where((weight > 0) & (grad > 0), ratio, 1.0)


def build_optimizer(settings: recipe.Optim, model: nn.Module) -> MomentumSGD:
    """The optimiser a recipe names, over the trainable parameters of ``model``."""
    decayed, plain = split_parameters(model)
    match settings:
        case recipe.Sgd():
            return MomentumSGD(decayed, plain, settings.momentum, settings.nesterov, settings.weight_decay)
        case recipe.Lars():
            return LARS(
                decayed, plain, settings.momentum, settings.weight_decay,
                settings.trust_coefficient, settings.epsilon, settings.clip,
            )  # fmt: skip
        case _:
            assert_never(settings)


def split_parameters(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Trainable parameters that are decayed, and those that are not: biases and everything in norm layers."""
    decayed: dict[Tensor, None] = {}
    plain: dict[Tensor, None] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if param.requires_grad:
                (plain if isinstance(module, _NORMS) or name == "bias" else decayed)[param] = None
    return list(decayed), list(plain)


def gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """Every parameter's gradient; a missing one is an error of the caller."""
    grads = [p.grad for p in params]
    assert all(g is not None for g in grads), "a parameter has no gradient: finish the synchronisation first"
    return [g for g in grads if g is not None]
