"""Update lists of tensors by SGD or LARS, with torch's multi-tensor operations."""

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
"""Function from the norms [..., parameters] of this rank's parts of parameters to the norms of the whole parameters.

Ranks that hold parts of the same parameters call it in the same order.
"""

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class _Piece:
    """A tensor, or some of its elements, as one update sees it."""

    weight: Tensor
    grad: Tensor
    velocity: Tensor
    owner: int
    """Index of the updated tensor it belongs to."""


class MomentumSGD:
    """SGD with momentum, as ``torch.optim.SGD``: v <- mu v + g + wd w; w <- w - lr v.

    The learning rate is not part of the momentum buffer, so a change of rate applies at once to what the buffer holds.
    This is the momentum correction of Goyal et al. (arXiv 1706.02677).
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
        """Start with momentum buffers of 0.

        Args:
            decayed: Parameters with weight decay.
            plain: Parameters without weight decay.
            momentum: mu.
            nesterov: Whether to use Nesterov momentum.
            weight_decay: wd.
            corrected: Whether gradients already contain their momentum, as ``sparse`` applies it on each rank. Then
                only the decay gets momentum here: v <- mu v + wd w; w <- w - lr (v + g).
            whole_norms: Needed if parameters are shards; None: this rank holds whole parameters.

        Raises:
            ValueError: A parameter does not fill its memory.
        """
        self.params = [*decayed, *plain]
        """All parameters it updates."""
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
        """Update ``params`` from their gradients.

        Args:
            lr: Learning rate.
            params: Parameters to update; None: all.
            found_inf: If it is 1 on the device, nothing is changed. None: not checked.
            elements: Only these elements are updated; the others keep their weight and momentum. None: all elements.
        """
        chosen = self.params if params is None else params
        decayed, plain = [p for p in chosen if p in self._decayed], [p for p in chosen if p not in self._decayed]
        self._step_decayed(decayed, self._pieces(decayed, elements), lr, found_inf)
        self._descend(self._pieces(plain, elements), lr, 0.0, found_inf)

    def gradient_norm(self) -> Tensor:
        """Return the L2 norm of all gradients together; 0 if there are none."""
        params = [p for p in self.params if p.grad is not None]
        if not params:
            return torch.zeros((), device=self.params[0].device)
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
        """Momentum buffer of each parameter, in the parameter's memory layout; it is the only state."""
        return self._velocity


class LARS(MomentumSGD):
    """Layer-wise adaptive rate scaling (You et al., arXiv 1708.03888).

    The learning rate is not part of the momentum buffer, as in ``MomentumSGD``. MLPerf's reference has it there: v <-
    mu v + lr step; w <- w - v. Both are equal while the rate is constant. After a change, the reference still applies
    older rates to what its buffer holds. NVIDIA's submissions multiply mu by lr_t / lr_(t-1) to correct that, which
    equals the form here.

    Each decayed tensor's step is scaled by its trust ratio, eta |w| / (|g| + wd |w| + eps), or by 1 if either norm is
    zero. Plain tensors take SGD's step (``split_parameters`` decides which they are). With ``clip`` the layer's rate is
    min(lr, (1 - mu) eta |w| / |g|) instead, as in NVIDIA Caffe's LARC. If only some elements were sent, the norms are
    over those elements.

    The gradients passed in are overwritten. Norms are taken in fp32 of the values in ``p.grad``, so gradients must
    already be averaged and unscaled.
    """

    def __init__(
        self, decayed: Sequence[nn.Parameter], plain: Sequence[nn.Parameter], momentum: float, weight_decay: float,
        trust_coefficient: float, epsilon: float, clip: bool, whole_norms: WholeNorms | None = None,
    ) -> None:  # fmt: skip
        """Start with momentum buffers of 0.

        Args:
            decayed: Parameters with weight decay and a trust ratio.
            plain: Parameters with neither.
            momentum: mu.
            weight_decay: wd.
            trust_coefficient: eta.
            epsilon: eps.
            clip: Whether to clip the rate as LARC does.
            whole_norms: Needed if parameters are shards; None: this rank holds whole parameters.
        """
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
        if not pieces:  # not before the norms: other ranks may have pieces and wait for this rank
            return
        torch._foreach_add_(grads, weights, alpha=self._weight_decay)
        torch._foreach_mul_(grads, [ratios[owner] for owner in owners])
        self._descend(pieces, lr, 0.0, found_inf)

    def _trust_ratios(self, weight: Tensor, grad: Tensor, lr: float) -> Tensor:
        """Return the multiple of ``lr`` for each tensor's step, fp32 [tensors], from their norms."""
        if self._clip:
            ratio = ((1 - self._momentum) * self._eta * weight / (lr * grad)).clamp(max=1.0)
        else:
            ratio = self._eta * weight / (grad + self._weight_decay * weight + self._epsilon)
        return torch.where((weight > 0) & (grad > 0), ratio, 1.0)


def _norms(tensors: list[Tensor], owners: list[int], params: list[nn.Parameter]) -> Tensor:
    """Return L2 norms [parameters], each over all tensors of one owner."""
    norms = _each_norm(tensors)
    if owners == list(range(len(params))):
        return torch.stack(norms)
    sums = params[0].new_zeros(len(params))
    if norms:
        numbers = torch.tensor(owners, pin_memory=sums.is_cuda)  # a copy from pageable memory would make the host wait
        sums.index_add_(0, numbers.to(sums.device, non_blocking=True), torch.stack(norms).square())
    return sums.sqrt()


def _each_norm(tensors: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(tensors)) if tensors else []


def _as_they_are(params: Sequence[nn.Parameter], norms: Tensor) -> Tensor:
    """Return ``norms`` unchanged: this rank holds whole parameters."""
    return norms


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return a flat view of a dense tensor's elements in memory order, whatever its strides."""
    return tensor.as_strided((tensor.numel(),), (1,))


def build_optimizer(
    settings: schema.Optim, model: nn.Module, corrected: bool = False, whole_norms: WholeNorms | None = None
) -> MomentumSGD:
    """Build the optimiser that a recipe names, over the trainable parameters of ``model``.

    Args:
        settings: The recipe's optimiser table.
        model: The model, or this rank's part of it.
        corrected: See ``MomentumSGD``.
        whole_norms: See ``MomentumSGD``.
    """
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

    All parameters of norm layers are plain. Biases are plain too, unless LARS scales them as it scales weights.
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
    """Multiply gradients in place by ``factor``.

    Args:
        params: Parameters whose gradients are multiplied.
        factor: fp32 [].
        elements: Only these elements are multiplied; the others are not gradients of this step, but values that an
            engine has yet to send. None: all elements.
    """
    if elements is None:
        parts = gradients(params)
    else:
        flat = {param: _in_memory_order(grad) for param, grad in zip(params, gradients(params), strict=True)}
        parts = [flat[param][part] for param in params for part in elements.get(param, ())]
    if parts:
        torch._foreach_mul_(parts, factor)


def gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of every parameter.

    Raises:
        AssertionError: A gradient is missing, because the caller has not finished the synchronisation.
    """
    grads = [p.grad for p in params]
    assert all(g is not None for g in grads), "a parameter has no gradient: finish the synchronisation first"
    return [g for g in grads if g is not None]
