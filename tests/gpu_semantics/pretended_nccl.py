"""Process groups that carry out on a stream of their own each, as NCCL's do, what gloo then does at once."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

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
    )}  # fmt: skip

    gather = comm_stream.all_gather_single

    def run(
        name: str, act: Callable[[], object], reads: Sequence[Tensor], writes: Sequence[Tensor], group: Any,
        async_op: bool,
    ) -> Work | None:  # fmt: skip
        stream = device.communicator(group)
        device.detector.wait(stream.number, device.detector.moment(device.current.number))
        before = {id(inner_of(x)): inner_of(x).clone() for x in reads if is_on_gpu(x)}
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if name != _MESSAGES:
                agree(name, [*reads, *writes], group)
            act()
        device.launch(stream, name, reads, writes, before)
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

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if not is_on_gpu(tensor):
            return real["all_reduce"](tensor, op, group, async_op)
        return run("all_reduce", lambda: _reduce(inner_of(tensor), op, group), [tensor], [tensor], group, async_op)

    def _reduce(values: Tensor, op: Any, group: Any) -> None:
        if op == dist.ReduceOp.AVG:
            real["all_reduce"](values, dist.ReduceOp.SUM, group)
            values /= dist.get_world_size(group)
        else:
            real["all_reduce"](values, op, group)

    def all_to_all_single(
        output: Tensor, input: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None,
        group: Any = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        if not is_on_gpu(output):
            return real["all_to_all_single"](output, input, output_split_sizes, input_split_sizes, group, async_op)
        return run(
            "all_to_all",
            lambda: real["all_to_all_single"](
                inner_of(output), inner_of(input), output_split_sizes, input_split_sizes, group
            ),
            [input], [output], group, async_op,
        )  # fmt: skip

    def all_gather_into_tensor(output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if not is_on_gpu(output):
            return gather(output, input, group, async_op)
        return run(
            "all_gather", lambda: gather(inner_of(output), inner_of(input).clone(), group),
            [input], [output], group, async_op,
        )  # fmt: skip

    def reduce_scatter_tensor(
        output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        def act() -> None:
            whole = inner_of(input).clone()
            _reduce(whole, op, group)
            inner_of(output).copy_(whole.view(dist.get_world_size(group), -1)[dist.get_rank(group)])

        return run("reduce_scatter", act, [input], [output], group, async_op)

    def broadcast(tensor: Tensor, src: Any = None, group: Any = None, async_op: bool = False, **more: Any) -> Any:
        if not is_on_gpu(tensor):
            return real["broadcast"](tensor, src, group, async_op, **more)
        return run(
            "broadcast",
            lambda: real["broadcast"](inner_of(tensor), src, group, **more),
            [tensor],
            [tensor],
            group,
            async_op,
        )

    def batch_isend_irecv(operations: Sequence[Any]) -> list[Any]:
        if not is_on_gpu(operations[0].tensor):
            return list(real["batch_isend_irecv"](operations))
        sent = [o.tensor for o in operations if o.op is dist.isend]
        received = [o.tensor for o in operations if o.op is dist.irecv]

        def act() -> None:
            inner = [dist.P2POp(o.op, inner_of(o.tensor), o.peer, o.group, o.tag) for o in operations]
            for work in real["batch_isend_irecv"](inner):
                work.wait()

        return [run(_MESSAGES, act, sent, received, operations[0].group, True)]

    def new_group(
        ranks: Any, timeout: Any = None, *_: Any, use_local_synchronization: bool = False, pg_options: Any = None,
        **__: Any,
    ) -> Any:  # fmt: skip
        if pg_options is not None:
            device.group_limits.append(getattr(pg_options.config, "max_ctas", None))
        return real["new_group"](ranks, timeout, "gloo", use_local_synchronization=use_local_synchronization)

    return {
        "all_reduce": all_reduce, "all_to_all_single": all_to_all_single,
        "all_gather_into_tensor": all_gather_into_tensor, "reduce_scatter_tensor": reduce_scatter_tensor,
        "broadcast": broadcast, "batch_isend_irecv": batch_isend_irecv, "new_group": new_group,
    }  # fmt: skip
