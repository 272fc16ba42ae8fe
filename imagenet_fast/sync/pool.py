"""Every gradient of a model in one flat buffer, in the order backward produces them.

The buffer is what engines send: any run of neighbouring gradients is one contiguous slice of it, so fusing
tensors into one message (GradientFlow's lazy all-reduce, arXiv 1902.06855) costs no copy.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from imagenet_fast.sync.deferral import Deferral, Update
from imagenet_fast.sync.engine import Elements, SyncEngine, SyncStats
from imagenet_fast.sync.span import Span, move
from imagenet_fast.sync.stepping import captured_step, needs_all, settle_before_state
from imagenet_fast.sync.timetable import Timetable
from imagenet_fast.sync.topology import Topology

_LINE = 16  # elements: spans start on 64-byte lines in fp32, so vectorised kernels keep their fast path
_USED = 2.0**-14  # any 16-bit type holds it, and no gradient is lost beside it


class GradientPool:
    """One flat buffer holding the gradient of every trainable parameter of ``model``, last layer first.

    During backward a hook moves each finished gradient into its place and makes ``p.grad`` a view of it,
    with the parameter's own strides (channels_last survives). Autograd hands over a fresh tensor and we copy
    it, rather than letting autograd accumulate into the view: that costs two passes over memory instead of
    the four of a memset and an in-place add. Later micro-steps of one step do add in place.

    Gradients are averaged over the ranks of ``group``, by default all. Of a model whose parameters need several pools,
    each is given its named parameters, and the ``model`` whose forward reads them. Which ranks share a node is found by
    :class:`Topology` unless ``ranks_per_node`` says it, or a ``topology`` says all of that. All parameters must share
    one dtype and device.

    Spans reach the engine strictly in pool order, the same on every rank, although hooks fire in an order of their own.
    It is the reverse of the order of registration in the first step, and from the second on the order in which the
    first rank's backward produced them. Behind each gradient lies one element (``Span.flag``) that says whether a rank
    has used the parameter: one that nobody used is left alone by the update, as DDP does.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup | None = None,
        *,
        model: nn.Module | None = None,
        ranks_per_node: int | None = None,
        topology: Topology | None = None,
    ) -> None:
        if isinstance(parameters, nn.Module):
            model = parameters
            parameters = model.named_parameters()
        trainable = {name: p for name, p in dict(parameters).items() if p.requires_grad}
        if not trainable:
            raise ValueError("the model has no trainable parameter")
        kinds = {(p.dtype, p.device) for p in trainable.values()}
        if len(kinds) > 1:
            raise ValueError(f"parameters of one pool share a dtype and a device, found {sorted(map(str, kinds))}")
        ((self._dtype, device),) = kinds
        if not self._dtype.is_floating_point:
            raise ValueError(
                f"a pool cannot hold {self._dtype}, which would travel without its imaginary part; "
                "make parameters of torch.view_as_real's kind, and take torch.view_as_complex of them in forward"
            )
        self.model = model
        self.topology = topology or Topology(device, group, ranks_per_node)
        self.buffer = torch.zeros(0, dtype=self._dtype, device=device)
        self.line = math.lcm(_LINE, self.topology.line)
        """Elements: spans begin and end on multiples of it."""
        self._multiple = 1
        self._guard: float | None = None
        self._lock = threading.RLock()  # autograd may run several threads
        self._ready: list[bool] = []  # by span: whether its gradient may leave
        self._front = 0  # spans before this one have been handed to the engine
        self._unreached: list[Span] = []  # by this rank's last backward
        self._largest: list[Tensor] = []  # magnitudes in this step, by span
        self.spans: list[Span] = []
        self._engine: SyncEngine | None = None
        self._deferral: Deferral | None = None
        owners = {p: module for module in (model or nn.Module()).modules() for p in module.parameters(recurse=False)}
        self._lay_out([Span(0, name, p, owners.get(p), 0, 0) for name, p in reversed(trainable.items())])
        self._hooks = [param.register_post_accumulate_grad_hook(self._collect) for param in trainable.values()]
        self._sync = True
        self._learnt: list[Span] | None = []  # spans by when their gradients came; None once the order is known
        self._better: list[Span] | None = None
        self._open = False  # whether gradients have come since zero_grad or finish
        self._finished: SyncStats | None = None  # of the step whose gradients are here
        self.found_inf: Tensor | None = None
        """With :meth:`guard`: 1 where a gradient of the last step, on any rank, was not finite or too large for the
        wire, else 0."""

    def attach(self, engine: SyncEngine) -> None:
        """Send the spans of every later backward to ``engine``, instead of to any before."""
        if engine.defers and self.model is None:
            raise ValueError("an engine that defers updates needs to see the forward; give the pool model=...")
        if self._engine is not None:
            self._engine.close()
        self._engine = engine
        if self._deferral is not None:
            self._deferral.engine = engine
        elif engine.defers and self.model is not None:
            self._deferral = Deferral(self.model, engine, self.spans, self.used)

    def guard(self, largest: float) -> None:
        """From now on look at every gradient before it is sent: see :attr:`found_inf`. One above ``largest`` counts as
        infinite. Costs a pass over the gradients and a tiny all-reduce a step."""
        self._guard = largest

    def zero_grad(self) -> None:
        """Start a step: forget the gradients of the last one. Touches no memory.

        After a backward that failed on the way, or whose step was never finished, what has left is waited for and
        dropped; nothing of that step may be applied on another rank, so what had not left by then is sent as NaN.
        """
        with self._lock:
            if self._open and any(self._ready):
                self._abandon()
            if self._deferral is not None and self._engine is not None:
                for span in self.spans:
                    if not self._deferral.waits(span):
                        self._engine.wait(span)  # it may be on its way, where a step has not been applied
            self._open, self._finished = False, None
            self._ready = [False] * len(self.spans)
            if self._better is not None:
                self._learn_order(self._better)
        for span in self.spans:
            span.param.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally: a backward inside hands nothing to the engine (as DDP's ``no_sync``)."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish(self) -> SyncStats:
        """End of the step's last backward: agree on every gradient that may not be deferred.

        Parameters that backward did not reach take part with a gradient of zero, so an unused layer neither
        stalls the frontier nor makes ranks disagree. Called again in a step it does nothing.
        """
        assert self._engine is not None, "attach an engine before the first step"
        if self._finished is not None:
            return self._finished
        self.settle()  # what this step's forward did not reach
        with self._lock:
            self._begin(self._engine)
            self._unreached = [span for span in self.spans if span.param.grad is None]
            for span in self._unreached:
                self._engine.take(self.buffer[span.start : span.flag + 1], None)
                span.param.grad = self._views[span.index]
            self._ready = [True] * len(self.spans)
            self._advance(self._engine)
            self._front = 0
            self._open = False
            self.found_inf = self._any_overflow()
            stats = self._finished = self._engine.finish()
            if self._learnt is not None:
                self._agree_on_order(whole=True)
        return stats

    def update(self, apply: Update, at_once: bool = False) -> None:
        """Have ``apply`` update the parameters it is given: all of them now, or each before it is read again.

        ``apply`` captures what belongs to this step, above all the learning rate. Several updates of a step are
        carried out in their order. One that needs all gradients ``at_once`` has an engine that defers wait for them.
        While a parameter's update is put off, ``p.grad`` is None.
        """
        assert self._engine is not None
        elements = self._engine.elements()
        limited = apply if elements is None else partial(_apply_to, apply, elements)
        if self._engine.defers and self._deferral is not None:
            self._deferral.update(limited, at_once)
        else:
            limited(self.used(self.spans))

    def step(self, optimizer: Optimizer) -> SyncStats:
        """End the step: :meth:`finish`, unless that has been called, and ``optimizer.step()`` with the means.

        Under an engine that defers, each layer is updated just before it is read again, with the hyper-parameters of
        this moment: an ``lr_scheduler`` may step at once. ``optimizer.state_dict()`` carries out what is put off
        first. An optimiser that needs all gradients at once (:func:`needs_all`) waits for them here. Parameters of the
        optimiser that are not in this pool are left alone. Raises ValueError where its step requires a closure, or
        the engine leaves a part of the gradients behind.
        """
        assert self._engine is not None, "attach an engine before the first step"
        if self._engine.leaves_behind:
            raise ValueError(
                "the engine sends a part of the gradients, and optimisers of torch would apply the rest as well: "
                "take another engine, or pool.update() and an optimiser that takes the elements it may touch"
            )
        apply = captured_step(optimizer)
        stats = self.finish()
        settle_before_state(optimizer, self.settle)
        self.update(apply, at_once=needs_all(optimizer))
        return stats

    def settle(self) -> None:
        """Carry out every update that an engine has put off. Forwards and ``state_dict`` of the model do it unasked;
        whoever reads parameters in another way calls this first."""
        if self._deferral is not None:
            self._deferral.settle()

    def used(self, spans: Sequence[Span]) -> list[nn.Parameter]:
        """The parameters of ``spans``, whose gradients are here, whatever has become of ``p.grad`` since, without those
        that no rank has used: their gradient becomes None. Asks the device about those that this rank has not used."""
        for span in spans:
            span.param.grad = self._views[span.index]
        unused = {span for span in spans if span in self._unreached and not self.buffer[span.flag].item()}
        for span in unused:
            span.param.grad = None
        return [span.param for span in spans if span not in unused]

    def watch(self, layers: bool) -> Timetable:
        """A timetable of the next steps."""
        if self.model is None:
            raise ValueError(
                "an engine that plans needs to see the forward; give the pool model=..., or the engine a fixed number "
                "of MiB"
            )
        return Timetable(self.model, self.spans, self.topology, layers)

    def lengthen(self, multiple: int) -> None:
        """Make the buffer's length a multiple of so many elements. For an engine, before it begins."""
        self._multiple = multiple
        self._lay_out(self.spans)

    def align(self, elements: int) -> None:
        """Have spans begin and end on multiples of so many elements. For an engine, before it begins."""
        if self.line % elements:
            self.line = math.lcm(self.line, elements)
            self._lay_out(self.spans)

    def order(self, names: Collection[str]) -> None:
        """Lay the pool out in this order of its parameters, and learn no other; nothing happens where ``names`` are
        those of another model. The engine has to do so too."""
        by_name = {span.name: span for span in self.spans}
        if by_name.keys() != set(names):
            return
        self._learnt = self._better = None
        self._lay_out([by_name[name] for name in names])

    def state_dict(self) -> dict[str, Any]:
        """What later steps depend on besides parameters and optimiser; between steps, by every rank. Settles first.

        It differs between ranks."""
        assert self._engine is not None
        self.settle()
        with self._lock:
            if self._better is not None:
                self._learn_order(self._better)
            self._engine.begin()  # it may be about to hand the pool to another
            order = [span.name for span in self.spans] if self._learnt is None else None
            return {"order": order, "elected": self._engine.elected, "engine": self._engine.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`'s value, which may be of another number of ranks."""
        assert self._engine is not None
        if state["elected"]:
            self._engine.elect(state["elected"])
        if state["order"] is not None:
            self.order(state["order"])
            self._engine.lay_out()
        self._engine.load_state_dict(state["engine"])

    def close(self) -> None:
        """End the engine, its threads and its process groups, and leave the model to others. Settles first."""
        for hook in self._hooks:
            hook.remove()
        if self._deferral is not None:
            self._deferral.close()
            self._deferral = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _lay_out(self, order: Sequence[Span]) -> None:
        """Give the parameter of every span its place. Values in the buffer move with it. Settles first."""
        self.settle()
        old, before = self.buffer, self.spans
        self.spans = []
        offset = 0
        for index, span in enumerate(order):
            stop = offset + (span.param.numel() // self.line + 1) * self.line
            self.spans.append(replace(span, index=index, start=offset, stop=stop))
            offset = stop
        self.buffer = torch.zeros(-(-offset // self._multiple) * self._multiple, dtype=self._dtype, device=old.device)
        self._views: list[Tensor] = []
        self._by_param = {span.param: span for span in self.spans}
        for span in self.spans:
            p = span.param
            self._views.append(self.buffer.as_strided(p.size(), _dense_strides(p), span.start))
        move(old, before, self.buffer, self.spans)
        self._flags = torch.tensor([span.flag for span in self.spans], device=old.device)
        self._unreached = []
        self._ready = [False] * len(self.spans)
        self._front = 0
        self._largest = []
        if self._deferral is not None:
            self._deferral.lay_out(self.spans)

    def _collect(self, param: nn.Parameter) -> None:
        """The hook: ``param`` has its gradient."""
        with self._lock:
            span = self._by_param[param]
            if self._deferral is not None and self._deferral.waits(span):
                raise RuntimeError(
                    f"{span.name} was read before its update: not by the forward of its own module or of one above, as "
                    "in the first step; call pool.settle() before such a forward"
                )
            if self._ready[span.index]:
                raise RuntimeError(
                    f"a second backward reached {span.name} in one step, after its gradient had left; wrap every "
                    "backward of a step but the last in pool.no_sync(), and begin each step with pool.zero_grad()"
                )
            if self._engine is not None:
                self._begin(self._engine)
            view = self._views[span.index]
            if param.grad is not view:
                assert param.grad is not None
                if self._engine is not None:
                    self._engine.take(view, param.grad)
                else:
                    view.copy_(param.grad)
                param.grad = view
            if self._sync and self._engine is not None:
                self._ready[span.index] = True
                if self._learnt is not None:
                    self._learnt.append(span)
                self._advance(self._engine)

    def _begin(self, engine: SyncEngine) -> None:
        if not self._open:
            if engine.leaves_behind:
                self.settle()  # it takes what it has sent out of the pool
            engine.begin()
            late = [span for span in self.spans if self._deferral is not None and self._deferral.waits(span)]
            flags = [self.buffer[span.flag].clone() for span in late]  # their update has yet to look
            self.buffer.index_fill_(0, self._flags, _USED)
            for span, flag in zip(late, flags, strict=True):
                self.buffer[span.flag] = flag
            self._open = True
            self._finished = None

    def _advance(self, engine: SyncEngine) -> None:
        """Move the frontier past every leading span that is ready, handing each to the engine."""
        while self._front < len(self.spans) and self._ready[self._front]:
            span = self.spans[self._front]
            if self._guard is not None:
                self._largest.append(torch.linalg.vector_norm(self.buffer[span.start : span.stop], math.inf))
            self._front += 1
            engine.push(span)

    def _abandon(self) -> None:
        """Bring an unfinished step to its end, so that no rank waits for this one, and drop it."""
        engine = self._engine
        assert engine is not None
        self.settle()  # what the forward did not reach
        for span in self.spans[self._front :]:
            engine.spoil(span, self._views[span.index])
        self._ready = [True] * len(self.spans)
        self._advance(engine)
        self._front = 0
        self._any_overflow()
        engine.finish()
        for span in self.spans:
            engine.wait(span)
        if self._learnt is not None:
            self._agree_on_order(whole=False)

    def _any_overflow(self) -> Tensor | None:
        if self._guard is None:
            return None
        largest, self._largest = torch.stack(self._largest).max(), []
        overflow = (~(largest <= self._guard)).float()
        if self.topology.size > 1:
            dist.all_reduce(overflow, dist.ReduceOp.MAX, group=self.topology.group)
        return overflow

    def _agree_on_order(self, whole: bool) -> None:
        """Learn the order in which the first rank's gradients came, those that did not come last; unless that rank has
        not seen the ``whole`` of its backward: then the next one tells."""
        came, self._learnt = self._learnt or [], []
        seen = set(came)
        order = [span.index for span in [*came, *(s for s in self.spans if s not in seen)]]
        agreed = torch.tensor(order if whole else [-1] * len(order), device=self.buffer.device)
        if self.topology.size > 1:
            dist.broadcast(agreed, self.topology.ranks[0], self.topology.group)
        indices = agreed.tolist()
        if indices[0] < 0:
            return
        self._learnt = None
        if indices != list(range(len(indices))):
            self._better = [self.spans[index] for index in indices]

    def _learn_order(self, order: Sequence[Span]) -> None:
        assert self._engine is not None
        self._better = None
        self.settle()
        self._engine.begin()  # it may have sent what lies in the pool, and knows it by its place
        self._lay_out(order)
        self._engine.lay_out()


def _apply_to(apply: Update, elements: Elements, params: list[nn.Parameter]) -> None:
    apply(params, elements)


def _dense_strides(param: nn.Parameter) -> tuple[int, ...]:
    """Its own strides; where it does not fill its memory, or overlaps itself, those that a copy would have."""
    return torch.empty_like(param, device="meta").stride()
