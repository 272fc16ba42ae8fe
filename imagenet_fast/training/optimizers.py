"""SGD and LARS as optimizers of torch, over lists of tensors at once, with torch's multi-tensor operations."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT
from torch.optim.sgd import sgd

from imagenet_fast.recipe import optim_config
from imagenet_fast.sync.engine import Elements

WholeNorms = Callable[[Sequence[nn.Parameter], Tensor], Tensor]
"""Function from the norms [..., parameters] of this rank's parts of parameters to the norms of the whole parameters.

Ranks that hold parts of the same parameters call it in the same order.
"""

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


@dataclass
class _Pieces:
    """Tensors, or some of their elements, as one update sees them."""

    weights: list[Tensor]
    grads: list[Tensor]
    velocities: list[Tensor]
    owners: list[int]
    """Index of the updated tensor that each belongs to."""


class SGD(Optimizer):
    """SGD with momentum, as ``torch.optim.SGD``: v <- mu v + g + wd w; w <- w - lr v.

    A group with ``decoupled_lr``, the rate at which its decay is wd, has v <- mu v + g; w <- (1 - wd lr / decoupled_lr)
    w - lr v instead (Loshchilov and Hutter, arXiv 1711.05101, as Composer's DecoupledSGDW).

    The learning rate is not part of the momentum buffer, so a change of rate applies at once to what the buffer holds.
    This is the momentum correction of Goyal et al. (arXiv 1706.02677). Unlike torch's, it can update some elements of a
    parameter, and it allocates momentum buffers when it is made.
    """

    one_by_one = True
    """Each parameter's update needs its own gradient and state alone: see ``sync.per_param_step``."""
    _step_supports_amp_scaling = True  # then GradScaler sets the next two for a step, as for torch's fused optimizers
    grad_scale: Tensor | None
    """Gradients are divided by it in the next steps; None or missing: by nothing."""
    found_inf: Tensor | None
    """If it is 1 on the device, the next steps change nothing; None or missing: not checked."""
    elements: Elements | None = None
    """The next steps update only these elements; the others keep their weight and momentum. None: all elements."""

    def __init__(
        self, params: ParamsT, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False,
        *, corrected: bool = False, decoupled_lr: float = 0.0,
    ) -> None:  # fmt: skip
        """Start with momentum buffers of 0. All settings can differ between parameter groups.

        Args:
            params: Parameters, or groups of them.
            lr: Learning rate.
            momentum: mu.
            weight_decay: wd.
            nesterov: Whether to use Nesterov momentum.
            corrected: Whether gradients already contain their momentum, as ``sparse`` applies it on each rank. Then
                only the decay gets momentum here: v <- mu v + wd w; w <- w - lr (v + g).
            decoupled_lr: Rate at which decoupled decay multiplies weights by 1 - wd; 0: decay is part of the gradient.

        Raises:
            ValueError: A parameter does not fill its memory.
        """
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "corrected": corrected,
                "decoupled_lr": decoupled_lr,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with momentum buffers of 0.

        Raises:
            ValueError: A parameter does not fill its memory.
        """
        # Without torch's decorator, which hides it from torch.compile and for that loads the compiler: a second or two.
        inspect.unwrap(Optimizer.add_param_group)(self, param_group)
        for param in self.param_groups[-1]["params"]:
            if param.stride() != torch.empty_like(param, device="meta").stride():
                raise ValueError(
                    "a parameter is a part of a larger tensor, or overlaps itself, and the fused update would write "
                    "past it: give the model one of its own, nn.Parameter(p.clone())"
                )
            self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of all groups."""
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def velocity(self) -> Mapping[nn.Parameter, Tensor]:
        """Momentum buffer of each parameter, in the parameter's memory layout; it is the only state."""
        return {param: self.state[param]["momentum_buffer"] for param in self.params}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: Runs forward and backward and returns the loss, as for optimizers of torch.

        Returns:
            What ``closure`` returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale = getattr(self, "grad_scale", None)
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                pieces = self._pieces(params)
                if grad_scale is not None and pieces.grads:
                    torch._foreach_mul_(pieces.grads, grad_scale.reciprocal())
                self._update(group, params, pieces)
        return loss

    def _update(self, group: Mapping[str, Any], params: list[nn.Parameter], pieces: _Pieces) -> None:
        self._descend(group, pieces, group["weight_decay"])

    def _descend(self, group: Mapping[str, Any], pieces: _Pieces, weight_decay: float) -> None:
        if not pieces.weights:
            return
        momentum = group["momentum"]
        if group["decoupled_lr"] and weight_decay:
            self._shrink(pieces.weights, weight_decay * group["lr"] / group["decoupled_lr"])
            weight_decay = 0.0
        if group["corrected"]:
            if weight_decay:
                zeros = [torch.zeros_like(grad) for grad in pieces.grads]
                self._sgd(group, replace(pieces, grads=zeros), momentum, weight_decay)
            momentum = weight_decay = 0.0
        self._sgd(group, pieces, momentum, weight_decay)

    def _shrink(self, weights: list[Tensor], by: float) -> None:
        """Multiply ``weights`` by 1 - ``by``, or by 1 on the device if ``found_inf`` is set there."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            torch._foreach_mul_(weights, 1 - by)
        else:
            torch._foreach_mul_(weights, 1 - by * (1 - found_inf.reshape(())))

    def _sgd(self, group: Mapping[str, Any], pieces: _Pieces, momentum: float, weight_decay: float) -> None:
        sgd(
            pieces.weights, pieces.grads, [v if momentum else None for v in pieces.velocities],
            fused=True, grad_scale=None, found_inf=getattr(self, "found_inf", None), weight_decay=weight_decay,
            momentum=momentum, lr=group["lr"], dampening=0.0, nesterov=group["nesterov"], maximize=False,
        )  # fmt: skip

    def _pieces(self, params: Sequence[nn.Parameter]) -> _Pieces:
        weights, grads, velocities = list[Tensor](params), list[Tensor](), list[Tensor]()
        for param in params:
            grad, velocity = param.grad, self.state[param].get("momentum_buffer")
            assert grad is not None
            if velocity is None:  # the state was cleared
                velocity = self.state[param]["momentum_buffer"] = torch.zeros_like(param)
            # The fused update walks through memory: with other strides it would mix up the elements.
            if velocity.stride() != param.stride():  # it was loaded, of a model in another memory format
                velocity = self.state[param]["momentum_buffer"] = torch.empty_like(param).copy_(velocity)
            if grad.stride() != param.stride():
                grad = torch.empty_like(param).copy_(grad)
            grads.append(grad)
            velocities.append(velocity)
        if self.elements is None:
            return _Pieces(weights, grads, velocities, list(range(len(params))))
        chosen = [self.elements.get(param, []) for param in params]

        def cut(tensors: list[Tensor]) -> list[Tensor]:
            flat = (x.as_strided((x.numel(),), (1,)) for x in tensors)  # in memory order, whatever the strides
            return [x[part] for x, parts in zip(flat, chosen, strict=True) for part in parts]

        owners = [owner for owner, parts in enumerate(chosen) for _ in parts]
        return _Pieces(cut(weights), cut(grads), cut(velocities), owners)


class LARS(SGD):
    """Layer-wise adaptive rate scaling (You et al., arXiv 1708.03888).

    The learning rate is not part of the momentum buffer, as in ``SGD``. MLPerf's reference has it there: v <- mu v + lr
    step; w <- w - v. Both are equal while the rate is constant. After a change, the reference still applies older rates
    to what its buffer holds. NVIDIA's submissions multiply mu by lr_t / lr_(t-1) to correct that, which equals the form
    here.

    Each tensor's step is scaled by its trust ratio, eta |w| / (|g| + wd |w| + eps), or by 1 if either norm is zero.
    With ``clip`` the layer's rate is min(lr, (1 - mu) eta |w| / |g|) instead, as in NVIDIA Caffe's LARC. Biases and the
    parameters of norm layers mostly take SGD's step: ``param_groups`` gives them a group whose eta is 0. If only some
    elements were sent, the norms are over those elements.

    The gradients are overwritten. Norms are taken in fp32 of the values in ``p.grad``, so gradients must be averaged.
    """

    whole_norms: WholeNorms | None = None
    """Needed if parameters are shards; None: this rank holds whole parameters."""

    def __init__(
        self, params: ParamsT, lr: float, momentum: float = 0.9, weight_decay: float = 0.0,
        trust_coefficient: float = 0.001, eps: float = 0.0, clip: bool = False,
    ) -> None:  # fmt: skip
        """Start with momentum buffers of 0. All settings can differ between parameter groups.

        Args:
            params: Parameters, or groups of them as ``param_groups`` returns.
            lr: Learning rate.
            momentum: mu.
            weight_decay: wd.
            trust_coefficient: eta; 0: the group takes SGD's step.
            eps: Added to the denominator of the trust ratio.
            clip: Whether to clip the rate as LARC does.

        Raises:
            ValueError: A parameter does not fill its memory.
        """
        Optimizer.__init__(
            self,
            params,
            {
                "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": False, "corrected": False,
                "decoupled_lr": 0.0,
                "trust_coefficient": trust_coefficient, "eps": eps, "clip": clip,
            },
        )  # fmt: skip

    def _update(self, group: Mapping[str, Any], params: list[nn.Parameter], pieces: _Pieces) -> None:
        if not group["trust_coefficient"]:
            return super()._update(group, params, pieces)
        norms = _norms(pieces, params)
        weight_norms, grad_norms = norms if self.whole_norms is None else self.whole_norms(params, norms)
        ratios = self._trust_ratios(group, weight_norms, grad_norms).unbind()
        if not pieces.weights:  # not before the norms: other ranks may have pieces and wait for this rank
            return None
        if group["weight_decay"]:
            torch._foreach_add_(pieces.grads, pieces.weights, alpha=group["weight_decay"])
        torch._foreach_mul_(pieces.grads, [ratios[owner] for owner in pieces.owners])
        return self._descend(group, pieces, 0.0)

    def _trust_ratios(self, group: Mapping[str, Any], weight: Tensor, grad: Tensor) -> Tensor:
        """Return the multiple of the rate for each tensor's step, fp32 [tensors], from their norms."""
        eta = group["trust_coefficient"]
        if group["clip"]:
            ratio = ((1 - group["momentum"]) * eta * weight / (group["lr"] * grad)).clamp(max=1.0)
        else:
            ratio = eta * weight / (grad + group["weight_decay"] * weight + group["eps"])
        return torch.where((weight > 0) & (grad > 0), ratio, 1.0)


def _norms(pieces: _Pieces, params: list[nn.Parameter]) -> Tensor:
    """Return the L2 norms [2, parameters] of weights and gradients, each over all tensors of one owner, in order."""
    if not pieces.weights:
        return params[0].new_zeros(2, len(params))
    norms = torch.stack(list(torch._foreach_norm([*pieces.weights, *pieces.grads]))).view(2, -1)
    if pieces.owners == list(range(len(params))):
        return norms
    counted = Counter(pieces.owners)
    lengths = [counted[owner] for owner in range(len(params))]
    counts = torch.tensor(lengths, device="cpu", pin_memory=norms.is_cuda)
    counts = counts.to(norms.device, non_blocking=True)  # from pageable memory the host would wait
    # Additions in any order, as of index_add_, would give each rank other bits.
    return torch.segment_reduce(norms.square().T, "sum", lengths=counts, unsafe=True).T.sqrt()


def build_optimizer(
    settings: optim_config.Optim, model: nn.Module, corrected: bool = False, whole_norms: WholeNorms | None = None
) -> SGD:
    """Build the optimizer that a recipe names, over the trainable parameters of ``model``, at its peak rate.

    Args:
        settings: The recipe's optimizer table.
        model: The model, or this rank's part of it.
        corrected: See ``SGD``.
        whole_norms: See ``LARS``.
    """
    match settings:
        case optim_config.Sgd():
            decayed, plain = split_parameters(model)
            rest = settings.weight_decay if settings.decay_all else 0.0
            groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": rest}]
            if settings.norm_bias_factor != 1:
                groups += _faster_biases(model, groups[1], settings)
            return SGD(
                groups,
                settings.lr, settings.momentum, settings.weight_decay, settings.nesterov, corrected=corrected,
                decoupled_lr=settings.lr if settings.decoupled else 0.0,
            )  # fmt: skip
        case optim_config.Lars():
            lars = LARS(
                param_groups(model, scale_biases=settings.biases == "scaled"), settings.lr, settings.momentum,
                settings.weight_decay, settings.trust_coefficient, settings.epsilon, settings.clip,
            )  # fmt: skip
            lars.whole_norms = whole_norms
            return lars
        case _:
            assert_never(settings)


def _faster_biases(model: nn.Module, plain: dict[str, Any], settings: optim_config.Sgd) -> list[dict[str, Any]]:
    """Take the biases of norm layers out of the group ``plain``, and return them as a group with their own rate."""
    factor = settings.norm_bias_factor
    norms = [module for module in model.modules() if _is_norm(module)]
    ids = {id(norm.bias) for norm in norms if getattr(norm, "bias", None) is not None}
    biases = [param for param in plain["params"] if id(param) in ids]
    plain["params"] = [param for param in plain["params"] if id(param) not in ids]
    if not biases:
        return []
    peak = factor * settings.lr
    decay = plain["weight_decay"] / (1 if settings.decoupled else factor)
    decoupled_lr = peak if settings.decoupled else 0.0
    return [{"params": biases, "lr": peak, "lr_factor": factor, "weight_decay": decay, "decoupled_lr": decoupled_lr}]


def param_groups(model: nn.Module, scale_biases: bool = False) -> list[dict[str, Any]]:
    """Return parameter groups for ``LARS``: the second one has neither weight decay nor trust ratios.

    Args:
        model: The model whose trainable parameters are grouped.
        scale_biases: See ``split_parameters``.
    """
    decayed, plain = split_parameters(model, scale_biases)
    return [{"params": decayed}, {"params": plain, "weight_decay": 0.0, "trust_coefficient": 0.0}]


def split_parameters(model: nn.Module, scale_biases: bool = False) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the trainable parameters into decayed and plain ones.

    All parameters of norm layers are plain, and so are biases, unless ``scale_biases``. Norm layers that torch does not
    know are recognised by their parameters' one dimension, as in timm.
    """
    decayed: dict[nn.Parameter, None] = {}
    plain: dict[nn.Parameter, None] = {}
    for module in model.modules():
        is_norm = _is_norm(module)
        for name, param in module.named_parameters(recurse=False):
            if param.requires_grad:
                is_plain = is_norm or (not scale_biases if name.endswith("bias") else param.dim() <= 1)
                (plain if is_plain else decayed)[param] = None
    return list(decayed), list(plain)


def _is_norm(module: nn.Module) -> bool:
    """Return whether ``module`` is a norm layer, of torch or with weights of one dimension as such layers have."""
    own = dict(module.named_parameters(recurse=False))
    looks_so = all(param.dim() <= 1 for param in own.values()) and any(not name.endswith("bias") for name in own)
    return isinstance(module, _NORMS) or looks_so


def total_norm(params: Iterable[nn.Parameter], whole_norms: WholeNorms | None = None) -> Tensor:
    """Return the L2 norm of all gradients of ``params`` together; 0 if there are none.

    Args:
        params: Parameters, at least one.
        whole_norms: See ``LARS``.
    """
    params = list(params)
    present = [param for param in params if param.grad is not None]
    if not present:
        return torch.zeros((), device=params[0].device)
    norms = torch.stack(list(torch._foreach_norm([param.grad for param in present if param.grad is not None])))
    norm: Tensor = torch.linalg.vector_norm(norms if whole_norms is None else whole_norms(present, norms))
    return norm
