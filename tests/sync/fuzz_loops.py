"""Carries a program out: with a pool and an engine, or by hand with torch alone."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from imagenet_fast.sync import (
    AllReduceSync,
    AutoSync,
    DearSync,
    EngineSettings,
    GradientPool,
    HybridSync,
    LazySync,
    PowerSgdSync,
    RingSync,
    SparseSync,
    build_engine,
)
from imagenet_fast.training.optimizers import SGD
from tests.sync.fuzz_models import Batch, Net, batch_of
from tests.sync.fuzz_programs import (
    AutogradGrad,
    Backward,
    Cancel,
    Change,
    Do,
    Fail,
    Finished,
    Locally,
    Look,
    Op,
    Optimizer,
    Peek,
    Program,
    ScaledStep,
    Step,
    ZeroGrad,
)
from tests.sync.loops import lending

HALF_KIB = 0.0005
"""MiB: a few tensors of the small models."""

EXACT: dict[str, EngineSettings] = {
    "allreduce": AllReduceSync(wire="fp32"),
    "ring": RingSync(wire="fp32", bucket_mb=HALF_KIB),
    "lazy": LazySync(wire="fp32", threshold_mb=0),
    "lazy auto": LazySync(wire="fp32"),
    "hybrid": HybridSync(wire="fp32", fuse_mb=0),
    "hybrid auto": HybridSync(wire="fp32"),
    "dear": DearSync(wire="fp32", bucket_mb=0),
    "dear fused": DearSync(wire="fp32", bucket_mb=HALF_KIB),
    "auto": AutoSync(wire="fp32"),
}
INEXACT: dict[str, EngineSettings] = {
    "lazy bf16": LazySync(wire="bf16", threshold_mb=HALF_KIB),
    "hybrid bf16": HybridSync(wire="bf16", fuse_mb=0),
    "lazy int8": LazySync(wire="int8", threshold_mb=HALF_KIB),
    "hybrid int8": HybridSync(wire="int8", fuse_mb=0),
    "dear fp8": DearSync(wire="fp8", bucket_mb=HALF_KIB),
    "powersgd": PowerSgdSync(wire="fp32", rank=1, bucket_mb=HALF_KIB),
    "powersgd dear": PowerSgdSync(wire="bf16", rank=1, timing="dear", bucket_mb=HALF_KIB),
}
SPARSE: dict[str, EngineSettings] = {
    "sparse": SparseSync(wire="fp32", sparsity=0.5, chunk=32, ramp_epochs=0, threshold_mb=0),
    "sparse hybrid": SparseSync(wire="fp32", sparsity=0.5, chunk=32, ramp_epochs=0, threshold_mb=0, timing="hybrid"),
    "sparse corrected": SparseSync(
        wire="fp32", sparsity=0.5, chunk=32, ramp_epochs=0, threshold_mb=0, momentum_correction=True, momentum=0.5
    ),
}
ENGINES = EXACT | INEXACT | SPARSE


class Synchroniser(Protocol):
    """What a loop calls: a pool, or what a user without one would write."""

    params: list[nn.Parameter]
    """Those that were trainable in the beginning."""

    def zero_grad(self) -> None: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def finish(self) -> None: ...
    def step(self, optimizer: optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> None: ...
    def skips(self) -> bool: ...
    def look_under_way(self, writes: bool) -> str: ...
    def settle(self) -> None: ...
    def swap(self, which: int) -> None: ...
    def renew(self) -> None: ...
    def save(self) -> object: ...
    def load(self, saved: Any) -> None: ...
    def close(self) -> None: ...


class ByHand:
    """Gradients averaged by one all-reduce; one that no rank has is None everywhere."""

    def __init__(self, model: nn.Module) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self._finished = False

    def zero_grad(self) -> None:
        self._finished = False
        for param in self.params:
            param.grad = None

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        ours = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        used = torch.tensor([float(p.grad is not None) for p in self.params])
        flat = torch.cat([used, *(grad.flatten() for grad in ours)])
        dist.all_reduce(flat)
        counts, *sums = flat.split([len(ours), *(grad.numel() for grad in ours)])
        for param, count, mean in zip(self.params, counts, sums, strict=True):
            if count:
                mean = (mean / dist.get_world_size()).view_as(param)
                param.grad = torch.empty_like(param).copy_(mean).detach()
            else:
                param.grad = None

    def step(self, optimizer: optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        self.finish()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    def skips(self) -> bool:
        return True  # as those who wrote the program know

    def look_under_way(self, writes: bool) -> str:
        return ""

    def settle(self) -> None:
        return

    def swap(self, which: int) -> None:
        return

    def renew(self) -> None:
        self.zero_grad()

    def save(self) -> object:
        return None

    def load(self, saved: Any) -> None:
        return

    def close(self) -> None:
        return


class Pooled:
    """A pool with an engine."""

    def __init__(self, model: nn.Module, engine: str, guarded: bool) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self._model, self._engine, self._guarded = model, engine, guarded
        self._family = next(family for family in (EXACT, INEXACT, SPARSE) if engine in family)
        self._open()
        # torch's optimizers do not know that a part of a gradient has come.
        corrected = "corrected" in engine
        self._partly = SGD(self.params, 0.05, weight_decay=0.01, corrected=corrected) if self.sparse else None
        self._stepped = False

    @property
    def sparse(self) -> bool:
        """Whether a part of the gradients stays behind, so that they are not the user's to change."""
        return self._family is SPARSE

    def _open(self) -> None:
        self._pool = GradientPool(self._model, topology=lending())
        if self._guarded:
            self._pool.guard(1e30)
        self._pool.attach(build_engine(ENGINES[self._engine], self._pool))

    def zero_grad(self) -> None:
        self._stepped = False
        self._pool.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        return self._pool.no_sync()

    def finish(self) -> None:
        self._pool.finish()

    def step(self, optimizer: optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        if self._partly is not None:  # in place of all of the loop's optimizers
            self._pool.finish()
            if not self._stepped:
                self._pool.step(self._partly)
            self._stepped = True
        elif scaler is None:
            self._pool.step(optimizer)
        else:
            self._pool.step(optimizer, scaler)

    def skips(self) -> bool:
        self._pool.finish()
        return bool(self._pool.found_inf)

    def look_under_way(self, writes: bool) -> str:
        for param in self.params:
            try:
                if param.grad is None:
                    continue
                if writes:
                    param.grad.mul_(2)
                else:
                    param.grad.sum()
            except RuntimeError as refusal:
                if "grad" not in str(refusal):
                    return f"refused, but not in words that tell of gradients: {refusal}"
            else:
                if writes:
                    return "a gradient under way could be changed in place"
        return ""

    def settle(self) -> None:
        self._pool.settle()

    def swap(self, which: int) -> None:
        if not self.sparse:
            self._engine = list(self._family)[which % len(self._family)]
            self._pool.attach(build_engine(ENGINES[self._engine], self._pool))

    def renew(self) -> None:
        self._pool.close()
        self._open()
        self._pool.zero_grad()

    def save(self) -> object:
        return self._engine, copy.deepcopy(self._pool.state_dict())

    def load(self, saved: Any) -> None:
        engine, state = saved
        if engine == self._engine != "auto":  # which may have elected another since
            self._pool.load_state_dict(copy.deepcopy(state))

    def close(self) -> None:
        self._pool.close()


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
    """A program at work on this rank."""

    def __init__(self, program: Program, synchroniser: Callable[[nn.Module], Synchroniser]) -> None:
        self.program, self.model = program, Net(program.model)
        self.rank = dist.get_rank()
        self.sync = synchroniser(self.model)
        self.optimizers = _optimizers(program, list(self.model.parameters()))
        self.schedulers = [s for o in self.optimizers if (s := _scheduler(program.schedule, o)) is not None]
        scaled = program.scaled and not self._keeps_its_gradients()
        self.scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=2) if scaled else None
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if program.averaged else None
        self.saved: list[Any] | None = None
        self.records: list[Record] = []
        self.violations: list[str] = []
        self._line = 0
        self._begun = False
        self._replaced = False
        self._zeroed_by_pool = False

    def run(self) -> None:
        """All of it. Raises :class:`Broken`."""
        for number, line in enumerate(self.program.lines):
            self._line = number
            try:
                self._do(line.op)
            except Exception as error:
                raise Broken(f"line {number}: {line.op}\n{traceback.format_exc()}") from error
        self._line = len(self.program.lines)
        try:
            self.sync.settle()
            self._record("the weights in the end", self._weights(), shared=True)
        except Exception as error:
            raise Broken(f"the end\n{traceback.format_exc()}") from error

    def _record(self, what: str, tensors: Iterable[Tensor], shared: bool = False) -> None:
        number = sum(record.line == self._line for record in self.records)
        self.records.append(Record(self._line, number, what, [t.detach().clone() for t in tensors], shared))

    def _weights(self) -> list[Tensor]:
        return list(self.model.parameters())

    def _do(self, op: Op) -> None:
        match op:
            case ZeroGrad():
                self._replaced, self._zeroed_by_pool = False, op.by_pool
                if op.also:
                    self.optimizers[0].zero_grad(set_to_none=False)
                if op.by_pool:
                    self.sync.zero_grad()
                else:
                    if isinstance(self.sync, ByHand):
                        self.sync.zero_grad()
                    for optimizer in self.optimizers:
                        optimizer.zero_grad()
            case Backward():
                with nullcontext() if op.sync else self.sync.no_sync():
                    loss = self._loss(op)
                    if loss.requires_grad:
                        loss.backward()
            case AutogradGrad():
                loss = self._loss(Backward(op.data, op.skipped))
                params = [p for p in self.sync.params if p.requires_grad]
                if loss.requires_grad:
                    grads = torch.autograd.grad(loss, params, allow_unused=True)
                    for param, grad in zip(params, grads, strict=True):
                        if grad is not None:
                            param.grad = grad
            case Fail():
                self._fail(op)
            case Locally(change):
                with self.sync.no_sync():
                    self._change(change)
            case Cancel(which):
                if not self._keeps_its_gradients():
                    for param in self.sync.params[which::3]:
                        param.grad = None
            case Peek(writes) if self._zeroed_by_pool:  # else gradients are this rank's own
                if violation := self.sync.look_under_way(writes):
                    self.violations.append(f"line {self._line}: {violation}")
            case Finished(change):
                self._finish()
                self._replaced = change is not None and not self._keeps_its_gradients()
                if change is not None and not self._keeps_its_gradients():
                    self._change(change)
            case Step(number, by_pool):
                if by_pool or self._keeps_its_gradients():
                    self.sync.step(self.optimizers[number])
                else:
                    self._finish()
                    self.optimizers[number].step()
            case ScaledStep():
                self._scaled_step(op)
            case Look():
                if self.rank == 0 or not op.alone:
                    self._look(op)
            case Do(what, which):
                self._do_simply(what, which)

    def _keeps_its_gradients(self) -> bool:
        return isinstance(self.sync, Pooled) and self.sync.sparse

    def _batch(self, number: int) -> Batch:
        return batch_of(self.program.seed, number, self.rank)

    def _forward(self, op: Backward, fails: Any = None) -> tuple[Tensor, Batch]:
        batch = self._batch(op.data)
        if op.penalty:
            batch.features.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.program.autocast):
            out = self.model(batch, op.skipped[self.rank], fails)
        return out, batch

    def _loss(self, op: Backward, fails: Any = None) -> Tensor:
        out, batch = self._forward(op, fails)
        loss = F.cross_entropy(out.float(), batch.tokens)
        if op.penalty:
            (slope,) = torch.autograd.grad(loss, batch.features, create_graph=True)
            loss = loss + slope.square().sum()
        if self.scaler is None:
            return loss
        return self.scaler.scale(loss * torch.inf if op.overflows == self.rank else loss)

    def _fail(self, op: Fail) -> None:
        failed = False
        try:
            loss = self._loss(Backward(op.data, op.skipped), op.places[self.rank])
            if loss.requires_grad:
                loss.backward()
        except MemoryError:
            failed = True
        if op.guarded and not failed and op.places[self.rank] is None and not self.sync.skips():
            self.violations.append(f"line {self._line}: another rank has failed, but found_inf is 0")

    def _change(self, change: Change) -> None:
        params = self.sync.params if change.which < 0 else self.sync.params[change.which :: 3]
        match change.how:
            case "clip norm":
                torch.nn.utils.clip_grad_norm_(params, 0.1)
            case "clip value":
                torch.nn.utils.clip_grad_value_(params, 0.01)
            case "log":
                self._record("gradients after finish()", [p.grad for p in params if p.grad is not None])
            case _:
                for number, param in enumerate(params):
                    if param.grad is not None:
                        _change_one(param, change.how, number)

    def _finish(self) -> None:
        """Unless gradients were replaced since, which is refused."""
        if not self._replaced:
            self.sync.finish()

    def _scaled_step(self, op: ScaledStep) -> None:
        (optimizer,) = self.optimizers
        if self.scaler is None:
            self.sync.step(optimizer)
            return
        if op.clips:
            self._finish()
            self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.sync.params, 0.1)
        if op.by_pool:
            self.sync.step(optimizer, self.scaler)
        else:
            self._finish()
            self.scaler.step(optimizer)
            self.scaler.update()

    def _look(self, op: Look) -> None:
        model = self.model
        match op.how:
            case "state_dict":
                state = model.state_dict()
                names = {name for name, _ in Net(self.program.model).named_parameters()}
                self._record("state_dict()", (state[name] for name in state if name in names), shared=True)
                self._record("state_dict()'s buffers", (state[name] for name in state if name not in names))
            case "parameters":
                self._record("parameters()", model.parameters(), shared=True)
            case "named_parameters":
                self._record("named_parameters()", dict(model.named_parameters()).values(), shared=True)
            case "deepcopy":
                self._record("deepcopy(model)", copy.deepcopy(model).parameters(), shared=True)
            case "pickle":
                # what is parametrised cannot be pickled
                parametrised = self.program.model.has("weight norm", "spectral norm")
                twin = copy.deepcopy(model) if parametrised else pickle.loads(pickle.dumps(model))
                self._record("a pickled model", twin.parameters(), shared=True)
            case "vector":
                self._record("a vector", [torch.nn.utils.parameters_to_vector(model.parameters())], shared=True)
            case "optimizer state":
                for optimizer in self.optimizers:
                    self._record("optimizer.state_dict()", _state_of(optimizer.state_dict()))
            case "optimizer deepcopy":
                for optimizer in self.optimizers:
                    twin = copy.deepcopy(optimizer)
                    params = [p for group in twin.param_groups for p in group["params"]]
                    self._record("deepcopy(optimizer)'s parameters", params, shared=True)
                    self._record("deepcopy(optimizer)'s state", _state_of(twin.state_dict()))
            case "eval forward":
                with self._evaluating():
                    self._record("the output in eval()", [model(self._batch(op.data))])
            case "train forward":
                with torch.no_grad():
                    self._record("the output in train()", [model(self._batch(op.data))])
            case "part":
                batch = self._batch(op.data)
                with self._evaluating():
                    for number, block in enumerate(self.program.model.blocks):
                        inputs = (batch.features, batch.tokens) if block.kind == "embedding" else (batch.features,)
                        self._record(f"block {number} alone", [model.get_submodule(f"block{number}")(*inputs)])
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

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.eval()
        with torch.no_grad():
            yield
        self.model.train()

    def _do_simply(self, what: str, which: int) -> None:
        model = self.model
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
            case "swap":
                self.sync.swap(which)
            case "renew":
                self.sync.renew()
            case "freeze":
                for param in self.sync.params[which::3]:
                    param.requires_grad_(False)
            case "unfreeze":
                for param in self.sync.params:
                    param.requires_grad_(True)
            case "shrink":
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(0.99)
            case "vector":
                vector = torch.nn.utils.parameters_to_vector(model.parameters())
                torch.nn.utils.vector_to_parameters(0.99 * vector.detach(), model.parameters())
            case _:
                self._do_with_average(what)

    def _do_with_average(self, what: str) -> None:
        average = self.average
        assert average is not None
        match what:
            case "average":
                average.update_parameters(self.model)
            case "average and look":
                average.update_parameters(self.model)
                average.eval()
                with torch.no_grad():
                    self._record("the average's output", [average(self._batch(0))])
                average.train()
            case "swap average":
                before = [p.detach().clone() for p in self.model.parameters()]
                _fill(self.model.parameters(), average.module.parameters())
                with self._evaluating():
                    self._record("the output with the average's weights", [self.model(self._batch(0))])
                _fill(self.model.parameters(), before)


class _Own(optim.SGD):
    """torch does not know that it updates parameters one by one."""


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
    match optimizer.kind:
        case "sgd":
            return optim.SGD(groups, **settings)
        case "adam":
            return optim.Adam(groups, **settings)
        case "adamw":
            return optim.AdamW(groups, **settings)
        case "rmsprop":
            return optim.RMSprop(groups, **settings)
        case "own":
            return _Own(groups, **settings)
        case "hooked":
            hooked = optim.SGD(groups, **settings)
            hooked.register_step_post_hook(lambda *_: None)
            return hooked


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
    assert param.grad is not None
    match how:
        case "halve":
            param.grad.mul_(0.5)
        case "half":
            param.grad = param.grad / 2
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
