"""Process groups that carry out on a stream of their own each, as NCCL's do, what gloo then does at once."""

from __future__ import annotations

import gc
import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from imagenet_fast.sync import comm_stream
from tests.gpu_semantics.accesses import inner_of, is_on_gpu


class Work:
    """What an operation of a process group returns. It holds its tensors until somebody has waited, as NCCL's does."""

    def __init__(self, stream: Any, tensors: Sequence[Tensor]) -> None:
        self._done = stream.record_event()
        self._held = list(tensors)

    def wait(self, timeout: object = None) -> bool:
        self._done.wait()
        self._held.clear()
        return True


_MESSAGES = "send and receive"


def collectives(device: Any) -> dict[str, Callable[..., Any]]:
    """Operations of process groups. Each runs on its group's stream behind the current one, and is waited for by
    ``Work.wait``; by whom has called, where it is not asynchronous."""
    real = {name: getattr(dist, name) for name in (
        "all_reduce", "all_to_all_single", "broadcast", "batch_isend_irecv", "new_group",
        "destroy_process_group",
    )}  # fmt: skip

    gather = comm_stream.all_gather_single

    def run(
        name: str, act: Callable[[Any], object], given: Any, reads: Sequence[Tensor], writes: Sequence[Tensor],
        group: Any, async_op: bool,
    ) -> Work | None:  # fmt: skip
        def exchange(stream: Any, given: Any, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
            before = {id(inner_of(x)): inner_of(x).clone() for x in reads if is_on_gpu(x)}
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                if name != _MESSAGES:
                    agree(name, [*reads, *writes], group)
                act(tree_map(inner_of, given))
            device.launch(stream, name, reads, writes, before)

        stream = device.communicator(group)
        stream.follow(device.current)
        if (graph := device.capturing(stream)) is not None:
            graph.groups.add(group or dist.group.WORLD)
        device.order(stream, exchange, given, reads, writes)
        work = Work(stream, [*reads, *writes])
        if async_op:
            return work
        work.wait()
        return None

    def agree(name: str, tensors: Sequence[Tensor], group: Any) -> None:
        """On what is called next. NCCL would hang, or mix up what ranks meant for each other."""
        call = f"{name} of {', '.join(f'{x.numel()} {x.dtype}' for x in tensors)}"
        own, world = torch.tensor([zlib.crc32(call.encode())]), dist.get_world_size(group)
        calls = torch.zeros(world, dtype=torch.int64)
        gather(calls, own, group)
        if len(set(calls.tolist())) > 1:
            device.detector.report("ranks call one group's collectives in different orders")
            raise AssertionError(f"ranks call other collectives than {call}")

    def on_stream(name: str, like: Callable[..., Any], act: Callable[..., object]) -> Callable[..., Any]:
        """``like``; of tensors on the GPU, ``act`` with their values. Where two are given, the second is only read."""
        signature = inspect.signature(like)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            tensors = [x for x in given.values() if isinstance(x, Tensor)]
            if not is_on_gpu(tensors[0]):
                return like(*args, **kwargs)
            group, async_op = given.get("group"), given.pop("async_op", False)
            return run(name, lambda values: act(**values), dict(given), tensors[-1:], tensors[:1], group, async_op)

        return call

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if op == dist.ReduceOp.AVG:
            real["all_reduce"](tensor, dist.ReduceOp.SUM, group)
            tensor /= dist.get_world_size(group)
        else:
            real["all_reduce"](tensor, op, group)

    def all_gather(output: Tensor, input: Tensor, group: Any = None) -> None:
        gather(output, input.clone(), group)

    def like_reduce_scatter(
        output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> None:
        raise AssertionError("gloo has none")

    def reduce_scatter(output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        whole = input.clone()
        all_reduce(whole, op, group)
        output.copy_(whole.view(dist.get_world_size(group), -1)[dist.get_rank(group)])

    def like_gather(output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> Any:
        return gather(output, input, group, async_op)

    def batch_isend_irecv(operations: Sequence[Any]) -> list[Any]:
        if not is_on_gpu(operations[0].tensor):
            return list(real["batch_isend_irecv"](operations))
        sent = [o.tensor for o in operations if o.op is dist.isend]
        received = [o.tensor for o in operations if o.op is dist.irecv]

        def act(given: Any) -> None:
            for work in real["batch_isend_irecv"]([dist.P2POp(*one) for one in given]):
                work.wait()

        given = [(o.op, o.tensor, o.peer, o.group, o.tag) for o in operations]
        return [run(_MESSAGES, act, given, sent, received, operations[0].group, True)]

    def new_group(
        ranks: Any, timeout: Any = None, *_: Any, use_local_synchronization: bool = False, pg_options: Any = None,
        **__: Any,
    ) -> Any:  # fmt: skip
        if pg_options is not None:
            device.group_limits.append(getattr(pg_options.config, "max_ctas", None))
        return real["new_group"](ranks, timeout, "gloo", use_local_synchronization=use_local_synchronization)

    def destroy(group: Any = None) -> None:
        if device.graphs:
            gc.collect()  # those that nobody holds
        if any(group in graph.groups or group is None for graph in device.graphs if graph.groups):
            device.detector.report("a process group is destroyed while a graph has its collectives")
        real["destroy_process_group"](group)

    return {
        "destroy_process_group": destroy,
        "all_reduce": on_stream("all_reduce", real["all_reduce"], all_reduce),
        "all_to_all_single": on_stream("all_to_all", real["all_to_all_single"], real["all_to_all_single"]),
        "all_gather_into_tensor": on_stream("all_gather", like_gather, all_gather),
        "reduce_scatter_tensor": on_stream("reduce_scatter", like_reduce_scatter, reduce_scatter),
        "broadcast": on_stream("broadcast", real["broadcast"], real["broadcast"]),
        "batch_isend_irecv": batch_isend_irecv,
        "new_group": new_group,
    }
