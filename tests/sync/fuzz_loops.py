"""Carries a program out: with a pool and an engine, or by hand with torch alone."""

from __future__ import annotations

import copy
import io
import pickle
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from imagenet_fast import sync
from imagenet_fast.sync import EngineSettings, GradientPool
from imagenet_fast.training import optimizers
from tests.ranks import lending
from tests.sync import fuzz_programs as ops
from tests.sync.fuzz_models import Batch, Net, batch_of
from tests.sync.fuzz_programs import Backward, Do, Fail, Look, Op, Optimizer, Program, Refused, Step

HALF_KIB = 0.0005
"""MiB: a few tensors of the small models."""

EXACT: dict[str, EngineSettings] = {
    "allreduce": sync.AllReduceSync(wire="fp32"),
    "ring": sync.RingSync(wire="fp32", bucket_mb=HALF_KIB),
    "lazy": sync.LazySync(wire="fp32", threshold_mb=0),
    "lazy auto": sync.LazySync(wire="fp32"),
    "hybrid": sync.HybridSync(wire="fp32", fuse_mb=0),
    "hybrid auto": sync.HybridSync(wire="fp32"),
    "hybrid by size": sync.HybridSync(wire="fp32", policy="by-size", fuse_mb=HALF_KIB),
    "dear": sync.DearSync(wire="fp32", bucket_mb=0),
    "dear fused": sync.DearSync(wire="fp32", bucket_mb=HALF_KIB),
    "auto": sync.AutoSync(wire="fp32"),
    "sparse whole": sync.SparseSync(wire="fp32", sparsity=0, chunk=16, ramp_epochs=0),
}
"""They average in fp32."""
INEXACT: dict[str, EngineSettings] = {
    "lazy bf16": sync.LazySync(wire="bf16", threshold_mb=HALF_KIB),
    "hybrid bf16": sync.HybridSync(wire="bf16", fuse_mb=0),
    "lazy int8": sync.LazySync(wire="int8", threshold_mb=HALF_KIB),
    "hybrid int8": sync.HybridSync(wire="int8", fuse_mb=0),
    "dear int8": sync.DearSync(wire="int8", bucket_mb=HALF_KIB),
    "powersgd": sync.PowerSgdSync(wire="fp32", rank=1, bucket_mb=HALF_KIB),
    "powersgd dear": sync.PowerSgdSync(wire="bf16", rank=1, timing="dear", bucket_mb=HALF_KIB),
}
"""They round, and most of them add what they have rounded off to a later gradient."""
_SPARSE = sync.SparseSync(wire="fp32", sparsity=0.5, chunk=32, ramp_epochs=0, threshold_mb=0)
SPARSE: dict[str, EngineSettings] = {
    "sparse": _SPARSE,
    "sparse hybrid": _SPARSE.model_copy(update={"timing": "hybrid"}),
    "sparse corrected": _SPARSE.model_copy(update={"momentum_correction": True, "momentum": 0.5}),
}
"""They keep a part of the gradients back."""
ENGINES = EXACT | INEXACT | SPARSE


def as_carried_out(program: Program, engine: str) -> Program:
    """The program as it is under an engine."""
    settings = ENGINES[engine]
    if isinstance(settings, sync.SparseSync):
        return program.leaving_gradients(settings.momentum_correction)
    return replace(program, scaled=program.scaled and not settings.keeps)


def can_carry_out(program: Program, engine: str) -> bool:
    """Whether an optimizer of ours, if the engine needs one, can do the same."""
    needs_ours = program.optimizers and isinstance(ENGINES[engine], sync.SparseSync)
    return not (needs_ours and program.model.has("cuts", "doubled", "shared memory"))


class ByHand:
    """What a loop calls: gradients averaged by one all-reduce; one that no rank has is None everywhere."""

    _finished = False

    def __init__(self, model: nn.Module) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        """Those that were trainable in the beginning."""

    def zero_grad(self) -> None:
        self._finished = False
        for param in self.params:
            param.grad = None

    def finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        ours = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        used = torch.tensor([float(p.grad is not None) for p in self.params], dtype=torch.float32)
        flat = torch.cat([used, *(grad.flatten() for grad in ours)])
        dist.all_reduce(flat)
        counts, *sums = flat.split([len(ours), *(grad.numel() for grad in ours)])
        for param, count, mean in zip(self.params, counts, sums, strict=True):
            if count:
                mean = (mean / dist.get_world_size()).view_as(param)
                param.grad = torch.empty_like(param).copy_(mean).detach()
            else:
                param.grad = None

    def step(self, optimizers: Sequence[optim.Optimizer]) -> None:
        self.finish()
        _step_each(optimizers, None)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def renew(self) -> None:
        self.zero_grad()

    def drop(self) -> None: ...
    def settle(self) -> None: ...
    def save(self) -> object: ...
    def load(self, saved: Any) -> None: ...
    def close(self) -> None: ...


class Pooled(ByHand):
    """Averaged by a pool with an engine instead, or by several that share the model."""

    def __init__(self, model: nn.Module, engine: str, program: Program) -> None:
        super().__init__(model)
        self._model, self._engine, self._guarded = model, engine, program.guarded
        # One that is closed in the middle of a step may leave something on its streams for ever.
        self._lent = program.pools == 1 and not any(line.op == Do("renew") for line in program.lines)
        family = next(family for family in (EXACT, INEXACT, SPARSE) if engine in family)
        self._others = [name for name in family if _keeps_back(name) in ("", _keeps_back(engine))]
        """The engines that can take its place."""
        named, pools = [(n, p) for n, p in model.named_parameters() if p.requires_grad], program.pools
        self._parts = [named[part * len(named) // pools : (part + 1) * len(named) // pools] for part in range(pools)]
        self._open()

    def _open(self) -> None:
        if len(self._parts) == 1:
            topology = lending() if self._lent else None
            self._pools = [GradientPool(self._model, ENGINES[self._engine], topology=topology)]
        else:
            first, count = self._others.index(self._engine), len(self._others)
            engines = [ENGINES[self._others[(first + 3 * number) % count]] for number in range(len(self._parts))]
            self._pools = [
                GradientPool(part, engine, model=self._model) for part, engine in zip(self._parts, engines, strict=True)
            ]
        for pool in self._pools if self._guarded else ():
            pool.guard(1e30)

    def zero_grad(self) -> None:
        for pool in self._pools:
            pool.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with ExitStack() as all_pools:
            for pool in self._pools:
                all_pools.enter_context(pool.no_sync())
            yield

    def finish(self) -> None:
        for pool in self._pools:
            stats = pool.finish()
            assert pool.finish() is stats, "finished again, it is another step"

    def step(self, optimizers: Sequence[optim.Optimizer]) -> None:
        for pool in self._pools:
            pool.step(*optimizers)

    def drop(self) -> None:
        for pool in self._pools:
            pool.drop()

    def settle(self) -> None:
        for pool in self._pools:
            pool.settle()

    def renew(self) -> None:
        self.close()
        self._open()
        self.zero_grad()

    def save(self) -> object:
        return [copy.deepcopy(pool.state_dict()) for pool in self._pools]

    def load(self, saved: Any) -> None:
        if self._engine != "auto":  # which may have elected another since
            for pool, state in zip(self._pools, saved, strict=True):
                pool.load_state_dict(copy.deepcopy(state))

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


def _keeps_back(engine: str) -> str:
    """How an engine keeps back a part of the gradients, if it does."""
    settings = ENGINES[engine]
    return f"corrected: {settings.momentum_correction}" if isinstance(settings, sync.SparseSync) else ""


@dataclass(frozen=True)
class Record:
    """What a loop has seen."""

    line: int
    number: int
    """Of those of the line."""
    what: str
    tensors: list[Tensor]
    shared: bool = False
    """Whether all ranks see the same: weights, not statistics or outputs."""


class Broken(Exception):
    """A program came to an error that it does not provoke."""


class Loop:
    """A program at work on this rank: by hand, or under an engine."""

    def __init__(self, program: Program, engine: str | None = None) -> None:
        self.program, self.engine, self.model = program, engine, Net(program.model)
        self.rank = dist.get_rank()
        self.sync = self._synchroniser(self.model)
        self.optimizers = _optimizers(program, list(self.model.parameters()))
        self.schedulers = [s for o in self.optimizers if (s := _scheduler(program.schedule, o)) is not None]
        self.scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=2) if program.scaled else None
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if program.averaged else None
        self.saved: list[Any] | None = None
        self.records: list[Record] = []
        self.violations: list[str] = []
        self._kept = list(self.model.parameters())
        self._line = 0

    def _synchroniser(self, model: nn.Module) -> ByHand:
        return ByHand(model) if self.engine is None else Pooled(model, self.engine, self.program)

    def run(self) -> Loop:
        """All of it. Raises :class:`Broken`."""
        try:
            for number, line in enumerate(self.program.lines):
                self._line = number
                self._try(line.op, str(line.op))
            self._line = len(self.program.lines)
            self._try(Look("settle"), "the end")
            self._record("the weights in the end", self.model.parameters(), shared=True)
        finally:
            torch.set_default_dtype(torch.float32)
        self.sync.close()
        return self

    def _try(self, op: Op, what: str) -> None:
        try:
            self._do(op)
        except Exception as error:
            raise Broken(f"line {self._line}: {what}\n{traceback.format_exc()}") from error

    def _record(self, what: str, tensors: Iterable[Tensor], shared: bool = False) -> None:
        number = sum(record.line == self._line for record in self.records)
        self.records.append(Record(self._line, number, what, [t.detach().clone() for t in tensors], shared))

    def _do(self, op: Op) -> None:
        match op:
            case ops.ZeroGrad(also):
                for optimizer in self.optimizers if also else ():
                    optimizer.zero_grad(set_to_none=False)
                self.sync.zero_grad()
            case Backward():
                with nullcontext() if op.sync else self.sync.no_sync():
                    loss = self._loss(op)
                    for other in op.between:
                        self._do(other)
                    if loss.requires_grad:
                        loss.backward()
            case ops.AutogradGrad():
                loss = self._loss(Backward(op.data, op.skipped))
                params = [p for p in self.sync.params if p.requires_grad]
                if loss.requires_grad:
                    grads = torch.autograd.grad(loss, params, allow_unused=True)
                    for param, grad in zip(params, grads, strict=True):
                        if grad is not None:
                            param.grad = grad
            case Fail():
                self._fail(op)
            case ops.Locally(how, which):
                with self.sync.no_sync():
                    self._change(how, which)
            case ops.Finished(how, which):
                self.sync.finish()
                self._change(how, which)
            case Step():
                self._step(op)
            case Look():
                if self.rank == 0 or not op.alone:
                    self._look(op)
            case Do(what, which):
                self._do_simply(what, which)
            case Refused():
                self._be_refused(op)

    def _violate(self, how: str) -> None:
        self.violations.append(f"line {self._line}: {how}")

    def _be_refused(self, op: Refused) -> None:
        if self.engine is not None:
            try:
                self._do(op.op)
            except (RuntimeError, ValueError) as refusal:
                if not re.search(op.words, str(refusal)):
                    self._violate(f"refused, but not in words like {op.words!r}: {refusal}")
            else:
                self._violate("not refused")

    def _batch(self, number: int) -> Batch:
        return batch_of(self.program.seed, number, self.rank)

    def _loss(self, op: Backward, fails: Any = None) -> Tensor:
        batch = self._batch(op.data)
        if op.penalty:
            batch.features.requires_grad_()
        decays = [self._decay(op)] if op.decay in ("before", "unasked") else []
        with torch.autocast("cpu", torch.bfloat16, enabled=self.program.autocast):
            loss = self._objective(op, batch, fails)
        if op.penalty:
            (slope,) = torch.autograd.grad(loss, batch.features, create_graph=True)
            loss = loss + slope.square().sum()
        decays += [self._decay(op)] if op.decay == "after" else []
        loss = sum(decays, loss)
        if self.scaler is None:
            return loss
        return self.scaler.scale(loss * torch.inf if op.overflows == self.rank else loss)

    def _objective(self, op: Backward, batch: Batch, fails: Any) -> Tensor:
        skipped = op.skipped[self.rank] if op.skipped else frozenset[int]()
        first = torch.zeros(())
        match op.how:
            case "call":
                out = self.model(batch, skipped, fails)
            case "forward":
                out = self.model.forward(batch, skipped)
            case "features":
                return self.model.features(batch, skipped).square().sum()
            case "block first":
                first = self.model.get_submodule("block0")(batch.features).square().sum()
                out = self.model(batch, skipped)
            case "jvp":
                tangent = torch.ones_like(batch.features)
                of = lambda features: self.model(Batch(features, batch.tokens), skipped)  # noqa: E731
                out = sum(torch.func.jvp(of, (batch.features,), (tangent,)))
        return F.cross_entropy(out.float(), batch.tokens) + first

    def _decay(self, op: Backward) -> Tensor:
        """Of all weights, without asking the model for its parameters where it is not asked."""
        weights = self._weights["by modules" if op.decay == "unasked" else "parameters"]
        return 0.01 * torch.stack([p.square().sum() for p in weights()]).sum()

    def _fail(self, op: Fail) -> None:
        with suppress(MemoryError):
            loss = self._loss(Backward(op.data, op.skipped), op.places[self.rank])
            if loss.requires_grad:
                loss.backward()

    def _change(self, how: str, which: int) -> None:
        params = self.sync.params if which < 0 else self.sync.params[which::3]
        match how:
            case "clip norm":
                torch.nn.utils.clip_grad_norm_(params, 0.1)
            case "clip value":
                torch.nn.utils.clip_grad_value_(params, 0.01)
            case "log":
                self._record("gradients after finish()", [p.grad for p in params if p.grad is not None])
            case _:
                for number, param in enumerate(params if how else ()):
                    if param.grad is not None:
                        _change_one(param, how, number)

    def _step(self, op: Step) -> None:
        chosen = [self.optimizers[number] for number in op.optimizers or range(len(self.optimizers))]
        if op.clips and self.scaler is not None:
            self.sync.finish()
            self.scaler.unscale_(self.optimizers[0])
            torch.nn.utils.clip_grad_norm_(self.sync.params, 0.1)
        if op.by_pool and self.scaler is None:
            self.sync.step(chosen)
        else:
            self.sync.finish()
            _step_each(chosen, self.scaler)

    def _look(self, op: Look) -> None:
        model, optimizers = self.model, self.optimizers
        # what is parametrised cannot be pickled
        pickled = copy.deepcopy if self.program.model.has("weight norm", "spectral norm", "orthogonal") else _pickled
        weights = self._weights | {
            "state_dict": lambda: _sorted(model.state_dict(), self._names),
            "deepcopy": lambda: copy.deepcopy(model).parameters(),
            "pickle": lambda: pickled(model).parameters(),
            "save": lambda: _saved(model).parameters(),
            "vector": lambda: [torch.nn.utils.parameters_to_vector(model.parameters())],
            "optimizer deepcopy": lambda: [param for o in optimizers for param in _params_of(copy.deepcopy(o))],
            "optimizer pickle": lambda: [param for o in optimizers for param in _params_of(_pickled(o))],
            "to": lambda: model.double().parameters(),
        }
        ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            "eval forward": self._evaluating, "train forward": torch.no_grad, "inference forward": torch.inference_mode,
            "autocast forward": partial(torch.autocast, "cpu", torch.bfloat16),
            "recorded": nullcontext, "recorded in eval": partial(self._evaluating, recorded=True),
        }  # fmt: skip
        if op.how in weights:
            self._record(op.how, weights[op.how](), shared=True)
        if op.how in ways:
            with ways[op.how]():
                self._record(op.how, [model(self._batch(op.data))])
        match op.how:
            case "state_dict":
                self._record("buffers", _sorted(model.state_dict(), model.state_dict().keys() - self._names))
            case "optimizer state":
                self._record(op.how, [value for o in optimizers for value in _state_of(o.state_dict())])
            case "optimizer deepcopy":
                self._record(op.how, [v for o in optimizers for v in _state_of(copy.deepcopy(o).state_dict())])
            case "part":
                with self._evaluating():
                    self._record("blocks alone", self._parts(op))
            case "part in train":
                self._record("blocks alone, recorded", self._parts(op))
            case "part in eval":
                with torch.no_grad():
                    self._record("blocks alone, each in eval()", self._parts(op, in_eval=True))
            case "states of parts":
                for number in range(len(self.program.model.blocks)):
                    block = model.get_submodule(f"block{number}")
                    state, named = block.state_dict(), dict(block.named_parameters())
                    copies = [copied(block) for copied in COPIES]
                    self._record(f"block {number}", [*state.values(), *named.values()])
                    self._record(f"copies of block {number}", [p for other in copies for p in other.parameters()])
            case "to":
                model.float()
            case "twin":
                for copied in COPIES:
                    self._train_twin(copied(copied(model)), ByHand, op)
                self._train_twin(copied(model), self._synchroniser, op)
            case "functional_call":
                params = dict(model.named_parameters())
                with torch.no_grad():
                    out = torch.func.functional_call(model, params, (self._batch(op.data),))
                self._record("functional_call's output", [out])
            case "toggle":
                model.eval()
                model.train()
            case "settle":
                self.sync.settle()

    @property
    def _weights(self) -> dict[str, Callable[[], Iterable[Tensor]]]:
        """Ways to all weights themselves."""
        model = self.model
        return {
            "parameters": model.parameters,
            "named_parameters": lambda: dict(model.named_parameters()).values(),
            "kept": lambda: self._kept,
            "around": lambda: nn.ModuleList([model]).parameters(),
            "by groups": lambda: [param for optimizer in self.optimizers for param in _params_of(optimizer)],
            "by modules": lambda: [p for part in model.modules() for p in part._parameters.values() if p is not None],
        }

    @property
    def _names(self) -> set[str]:
        return {name for name, _ in Net(self.program.model).named_parameters()}

    def _parts(self, op: Look, in_eval: bool = False) -> list[Tensor]:
        """What every block alone makes of the data."""
        batch, outputs = self._batch(op.data), []
        for number, block in enumerate(self.program.model.blocks):
            part = self.model.get_submodule(f"block{number}").train(self.model.training and not in_eval)
            outputs.append(part(*((batch.features, batch.tokens) if block.kind == "embedding" else (batch.features,))))
            part.train(self.model.training)
        return outputs

    def _train_twin(self, twin: Net, synchroniser: Callable[[nn.Module], ByHand], op: Look) -> None:
        """A step of a copy that has nothing of the pool's."""
        assert _names(twin) == _names(Net(self.program.model))
        assert {type(param) for param in twin.parameters()} == {nn.Parameter}
        sync, optimizers = synchroniser(twin), _optimizers(self.program, list(twin.parameters()))
        sync.zero_grad()
        batch = self._batch(op.data)
        F.cross_entropy(twin(batch), batch.tokens).backward()
        sync.step(optimizers)
        sync.settle()
        self._record("a copy after a step", twin.parameters())
        sync.close()

    @contextmanager
    def _evaluating(self, recorded: bool = False) -> Iterator[None]:
        self.model.eval()
        with nullcontext() if recorded else torch.no_grad():
            yield
        self.model.train()

    def _do_simply(self, what: str, which: int) -> None:
        model, params = self.model, self.sync.params
        match what:
            case "schedule":
                for scheduler in self.schedulers:
                    scheduler.step()
            case "save":
                keepers = [model, *self.optimizers, *self.schedulers, *([self.scaler] if self.scaler else [])]
                states = [(keeper, copy.deepcopy(keeper.state_dict())) for keeper in keepers]
                self.saved = [states, self.sync.save()]
            case "restore":
                if self.saved is not None:
                    for keeper, state in self.saved[0]:
                        keeper.load_state_dict(copy.deepcopy(state))
                    self.sync.load(self.saved[1])
            case "drop":
                self.sync.drop()
            case "settle":
                self.sync.settle()
            case "renew":
                self.sync.renew()
            case "freeze" | "unfreeze":
                for param in params[which::3] if what == "freeze" else params:
                    param.requires_grad_(what == "unfreeze")
            case "leave":
                self.sync.close()
                self.sync.close()
                fresh = Net(self.program.model)
                assert _names(model) == _names(fresh), "the model is left to others"
                self.sync = ByHand(model)
            case "load part":
                part = model.get_submodule(f"block{which}")
                part.load_state_dict({name: torch.ones_like(value) for name, value in part.state_dict().items()})
            case "shrink by data":
                for param in self._weights["by modules"]():
                    param.data.mul_(0.99)
            case "reset":
                torch.manual_seed(which)
                for module in model.modules():
                    if hasattr(module, "reset_parameters"):
                        module.reset_parameters()
            case "shrink by apply":
                model.apply(lambda module: _shrink(module.parameters(recurse=False)))
            case "contiguous":
                model.to(memory_format=torch.contiguous_format)
            case "float64":
                torch.set_default_dtype(torch.float64)
            case "vector":
                vector = torch.nn.utils.parameters_to_vector(model.parameters())
                torch.nn.utils.vector_to_parameters(0.99 * vector.detach(), model.parameters())
            case "average" | "average and look":
                self.average.update_parameters(model)
                if what == "average and look":
                    with torch.no_grad():
                        self._record("the average's output", [self.average.eval()(self._batch(0))])
                    self.average.train()
            case "swap average":
                before = [p.detach().clone() for p in model.parameters()]
                _fill(model.parameters(), self.average.module.parameters())
                with self._evaluating():
                    self._record("the output with the average's weights", [model(self._batch(0))])
                _fill(model.parameters(), before)
            case shrink:
                _shrink(self._weights[shrink.removeprefix("shrink ")]())


def _step_each(optimizers: Sequence[optim.Optimizer], scaler: torch.amp.GradScaler | None) -> None:
    for optimizer in optimizers:
        optimizer.step() if scaler is None else scaler.step(optimizer)
    if scaler is not None:
        scaler.update()


class _Own(optim.SGD):
    """torch does not know that it updates parameters one by one."""


class _Wrapper(optim.Optimizer):
    """Of the shape of Accelerate's: an optimizer without the attributes that ``Optimizer.__init__`` makes."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.optimizer, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def _optimizers(program: Program, params: Sequence[nn.Parameter]) -> list[optim.Optimizer]:
    count = len(program.optimizers)
    return [_optimizer(optimizer, params[number::count]) for number, optimizer in enumerate(program.optimizers)]


def _optimizer(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> optim.Optimizer:
    settings = dict(optimizer.settings)
    groups = [
        {"params": part, "lr": settings["lr"] / (1 + number)}
        for number in range(optimizer.groups)
        if (part := list(params[number :: optimizer.groups]))
    ]
    kinds: dict[str, Callable[..., optim.Optimizer]] = {
        "sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW, "rmsprop": optim.RMSprop, "own": _Own,
        "hooked": optim.SGD, "wrapped": optim.AdamW, "our sgd": optimizers.SGD,
        "our lars": partial(optimizers.LARS, trust_coefficient=0.01, eps=1e-9),
    }  # fmt: skip
    made = kinds[optimizer.kind](groups, **settings)
    if optimizer.kind == "hooked":
        made.register_step_post_hook(lambda *_: None)
    return _Wrapper(made) if optimizer.kind == "wrapped" else made


def _scheduler(kind: str, optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler | None:
    match kind:
        case "step":
            return lr_scheduler.StepLR(optimizer, 2, 0.5)
        case "exponential":
            return lr_scheduler.ExponentialLR(optimizer, 0.9)
        case "one cycle":
            return lr_scheduler.OneCycleLR(optimizer, 2 * optimizer.param_groups[0]["lr"], total_steps=100)
        case _:
            return None


def _change_one(param: nn.Parameter, how: str, number: int) -> None:
    match how:
        case "halve":
            param.grad.mul_(0.5)
        case "half":
            param.grad = param.grad / 2
        case "data":
            param.grad.data = param.grad / 2
        case "none":
            param.grad = None
        case "clamp":
            param.grad = param.grad.clamp(-0.01, 0.01)
        case "noise":
            param.grad.add_(0.01)
        case "none to half":
            param.grad = None if number % 2 else param.grad / 2


def _state_of(state: dict[str, Any]) -> list[Tensor]:
    kept = state["state"]
    return [v for number in sorted(kept) for _, v in sorted(kept[number].items()) if isinstance(v, Tensor)]


@torch.no_grad()
def _fill(params: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        param.copy_(value)


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = (copy.deepcopy, _pickled, _saved)


def _sorted(state: dict[str, Tensor], names: Collection[str]) -> list[Tensor]:
    return [state[name] for name in sorted(names) if name in state]


def _params_of(optimizer: optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@torch.no_grad()
def _shrink(params: Iterable[Tensor]) -> None:
    for param in params:
        param.mul_(0.99)


def _names(model: nn.Module) -> list[list[str]]:
    return [sorted(vars(module)) for module in model.modules()]
