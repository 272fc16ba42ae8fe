"""SGD and LARS over lists of tensors, updated together by torch's multi-tensor operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from imagenet_fast.recipe import schema
from imagenet_fast.sync.engine import Elements

WholeNorms = Callable[[Sequence[nn.Parameter], Tensor], Tensor]
"""Turns the norms [..., parameters] of what this rank holds of parameters into those of the whole ones. Ranks that hold
parts of the same ones ask for them in the same order."""

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class _Piece:
    """What one update looks at: a tensor, or some of its elements."""

    weight: Tensor
    grad: Tensor
    velocity: Tensor
    owner: int
    """Which of the updated tensors it belongs to."""


class MomentumSGD:
    """SGD with momentum: v <- mu v + g + wd w; w <- w - lr v, as ``torch.optim.SGD``.

    The rate stays outside the momentum buffer, so a change of rate takes effect at once on what the buffer
    holds (the momentum correction of Goyal et al., arXiv 1706.02677). ``plain`` parameters are not decayed. Raises
    ValueError for a parameter that does not fill its memory.

    ``corrected``: gradients come with their momentum in them (that of ``sparse``, of each rank), so only the decay has
    it from here: v <- mu v + wd w; w <- w - lr (v + g). ``whole_norms``: where parameters are shards.
    """

    def __init__(
        self,
        decayed: Sequence[nn.Parameter],
        plain: Sequence[nn.Parameter],
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        corrected: bool = False,
        whole_norms: WholeNorms | None = None,
    ) -> None:
        self.params = [*decayed, *plain]
        """Everything it updates."""
        if any(p.stride() != torch.empty_like(p, device="meta").stride() for p in self.params):
            raise ValueError(
                "a parameter is a part of a larger tensor, or overlaps itself, and the fused update would write past "
                "it: give the model one of its own, nn.Parameter(p.clone())"
            )
        self._decayed = set(decayed)
        self._momentum = momentum
        self._nesterov = nesterov
        self._weight_decay = weight_decay
        self._corrected = corrected
        self._whole_norms = whole_norms or _as_they_are
        self._velocity = {p: torch.zeros_like(p) for p in self.params}

    @torch.no_grad()
    def step(
        self,
        lr: float,
        params: Sequence[nn.Parameter] | None = None,
        found_inf: Tensor | None = None,
        elements: Elements | None = None,
    ) -> None:
        """Update ``params``, or everything, from ``p.grad``; where ``found_inf`` is 1, change nothing at all.

        With ``elements``, only those are updated: the others keep their weight and their momentum.
        """
        chosen = self.params if params is None else params
        decayed, plain = [p for p in chosen if p in self._decayed], [p for p in chosen if p not in self._decayed]
        self._step_decayed(decayed, self._pieces(decayed, elements), lr, found_inf)
        self._descend(self._pieces(plain, elements), lr, 0.0, found_inf)

    def gradient_norm(self) -> Tensor:
        """The L2 norm of all gradients together."""
        params = [p for p in self.params if p.grad is not None]
        norm: Tensor = torch.linalg.vector_norm(self._whole_norms(params, torch.stack(_each_norm(gradients(params)))))
        return norm

    def _step_decayed(
        self, params: list[nn.Parameter], pieces: list[_Piece], lr: float, found_inf: Tensor | None
    ) -> None:
        self._descend(pieces, lr, self._weight_decay, found_inf)

    def _descend(self, pieces: list[_Piece], lr: float, weight_decay: float, found_inf: Tensor | None) -> None:
        if not pieces:
            return
        weights, grads, velocities = zip(*((p.weight, p.grad, p.velocity) for p in pieces), strict=True)
        momentum = self._momentum
        if self._corrected:
            if weight_decay:
                self._sgd(
                    weights, [torch.zeros_like(g) for g in grads], velocities, momentum, lr, weight_decay, found_inf
                )
            momentum = weight_decay = 0.0
        self._sgd(weights, grads, velocities, momentum, lr, weight_decay, found_inf)

    def _sgd(
        self, weights: Sequence[Tensor], grads: Sequence[Tensor], velocities: Sequence[Tensor], momentum: float,
        lr: float, weight_decay: float, found_inf: Tensor | None,
    ) -> None:  # fmt: skip
        sgd(
            list(weights), list(grads), list(velocities) if momentum else [None] * len(weights),
            fused=True, grad_scale=None, found_inf=found_inf, weight_decay=weight_decay, momentum=momentum,
            lr=lr, dampening=0.0, nesterov=self._nesterov, maximize=False,
        )  # fmt: skip

    def _pieces(self, params: Sequence[nn.Parameter], elements: Elements | None) -> list[_Piece]:
        pieces = []
        for owner, (param, grad) in enumerate(zip(params, gradients(params), strict=True)):
            if elements is None:
                pieces.append(_Piece(param, grad, self._velocity[param], owner))
            else:
                w, g, v = (_in_memory_order(t) for t in (param, grad, self._velocity[param]))
                pieces += [_Piece(w[part], g[part], v[part], owner) for part in elements.get(param, ())]
        return pieces

    @property
    def velocity(self) -> Mapping[nn.Parameter, Tensor]:
        """The momentum of each parameter, laid out as it is: all the state there is."""
        return self._velocity


class LARS(MomentumSGD):
    """Layer-wise adaptive rate scaling (You et al., arXiv 1708.03888).

    The rate stays outside the momentum buffer, as in :class:`MomentumSGD`. MLPerf's reference keeps it inside:
    v <- mu v + lr step; w <- w - v. That is the same while the rate stands; once it changes, what the buffer holds
    still goes at older rates. NVIDIA's submissions multiply mu by lr_t / lr_(t-1) for it, which gives ours.

    Each decayed tensor's step is scaled by its trust ratio, eta |w| / (|g| + wd |w| + eps), or 1 where either
    norm is zero; plain ones take SGD's step (:func:`split_parameters` says which are). With ``clip`` the layer's rate
    is instead min(lr, (1 - mu) eta |w| / |g|): NVIDIA Caffe's LARC. Where only some elements were sent, the norms are
    theirs.

    Uses up the gradients it is given. Norms are taken in fp32 of whatever ``p.grad`` holds, so gradients must
    already be averaged and unscaled.
    """

    def __init__(
        self, decayed: Sequence[nn.Parameter], plain: Sequence[nn.Parameter], momentum: float, weight_decay: float,
        trust_coefficient: float, epsilon: float, clip: bool, whole_norms: WholeNorms | None = None,
    ) -> None:  # fmt: skip
        super().__init__(decayed, plain, momentum, False, weight_decay, whole_norms=whole_norms)
        self._eta = trust_coefficient
        self._epsilon = epsilon
        self._clip = clip

    def _step_decayed(
        self, params: list[nn.Parameter], pieces: list[_Piece], lr: float, found_inf: Tensor | None
    ) -> None:
        if not params:
            return
        weights, grads = [p.weight for p in pieces], [p.grad for p in pieces]
        owners = [p.owner for p in pieces]
        norms = torch.stack([_norms(weights, owners, params), _norms(grads, owners, params)])
        weight_norms, grad_norms = self._whole_norms(params, norms)
        ratios = self._trust_ratios(weight_norms, grad_norms, lr).unbind()
        if not pieces:  # but other ranks may have some, and have asked for norms
            return
        torch._foreach_add_(grads, weights, alpha=self._weight_decay)
        torch._foreach_mul_(grads, [ratios[owner] for owner in owners])
        self._descend(pieces, lr, 0.0, found_inf)

    def _trust_ratios(self, weight: Tensor, grad: Tensor, lr: float) -> Tensor:
        """The multiple of ``lr`` at which each tensor is stepped, from their norms, fp32 [tensors]."""
        if self._clip:
            ratio = ((1 - self._momentum) * self._eta * weight / (lr * grad)).clamp(max=1.0)
        else:
            ratio = self._eta * weight / (grad + self._weight_decay * weight + self._epsilon)
        return torch.where((weight > 0) & (grad > 0), ratio, 1.0)


def _norms(tensors: list[Tensor], owners: list[int], params: list[nn.Parameter]) -> Tensor:
    """L2 norms [parameters], of all the tensors of one owner together."""
    norms = _each_norm(tensors)
    if owners == list(range(len(params))):
        return torch.stack(norms)
    sums = params[0].new_zeros(len(params))
    if norms:
        numbers = torch.tensor(owners, pin_memory=sums.is_cuda)  # from pageable memory the copy would wait
        sums.index_add_(0, numbers.to(sums.device, non_blocking=True), torch.stack(norms).square())
    return sums.sqrt()


def _each_norm(tensors: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(tensors)) if tensors else []


def _as_they_are(params: Sequence[nn.Parameter], norms: Tensor) -> Tensor:
    """This rank holds whole parameters."""
    return norms


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor's elements as they lie in memory, whatever its strides."""
    return tensor.as_strided((tensor.numel(),), (1,))


def build_optimizer(
    settings: schema.Optim, model: nn.Module, corrected: bool = False, whole_norms: WholeNorms | None = None
) -> MomentumSGD:
    """The optimiser a recipe names, over the trainable parameters of ``model``. ``corrected`` and ``whole_norms``: see
    MomentumSGD."""
    decayed, plain = split_parameters(model, settings)
    match settings:
        case schema.Sgd():
            return MomentumSGD(
                decayed, plain, settings.momentum, settings.nesterov, settings.weight_decay, corrected, whole_norms
            )
        case schema.Lars():
            return LARS(
                decayed, plain, settings.momentum, settings.weight_decay,
                settings.trust_coefficient, settings.epsilon, settings.clip, whole_norms,
            )  # fmt: skip
        case _:
            assert_never(settings)


def split_parameters(model: nn.Module, settings: schema.Optim) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the trainable parameters into decayed and plain ones.

    Everything in norm layers is plain. Biases are plain too, unless LARS scales them as it scales weights.
    """
    scaled = isinstance(settings, schema.Lars) and settings.biases == "scaled"
    decayed: dict[nn.Parameter, None] = {}
    plain: dict[nn.Parameter, None] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if param.requires_grad:
                is_plain = isinstance(module, _NORMS) or (name == "bias" and not scaled)
                (plain if is_plain else decayed)[param] = None
    return list(decayed), list(plain)


def multiply_gradients(params: Sequence[nn.Parameter], factor: Tensor, elements: Elements | None = None) -> None:
    """Multiply gradients by ``factor``, fp32 []. With ``elements`` only those: the others are no gradients of this step
    but what an engine has yet to send."""
    if elements is None:
        parts = gradients(params)
    else:
        flat = {param: _in_memory_order(grad) for param, grad in zip(params, gradients(params), strict=True)}
        parts = [flat[param][part] for param in params for part in elements.get(param, ())]
    if parts:
        torch._foreach_mul_(parts, factor)


def gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """Every parameter's gradient; a missing one is an error of the caller."""
    grads = [p.grad for p in params]
    assert all(g is not None for g in grads), "a parameter has no gradient: finish the synchronisation first"
    return [g for g in grads if g is not None]
