"""Shell script for nodes that are reached by ssh, with one ssh per node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from imagenet_fast.distributed.network_interfaces import Endpoint
from imagenet_fast.errors import UserError
from imagenet_fast.launch.cluster_job import ClusterJob

_SSH = "ssh -n -o BatchMode=yes"  # without BatchMode it would wait for a password that no user can enter


def parse_hosts(text: str, nodes: int | None) -> list[str]:
    """Return the first ``nodes`` hosts of a list like ``a,user@b,fd00::1``; None for all. Raises UserError."""
    hosts = [host.strip() for host in text.split(",")]
    for host in hosts:
        if not re.fullmatch(r"(?:[A-Za-z0-9_][\w.+-]*@)?[A-Za-z0-9_:][A-Za-z0-9_.:%-]*", host, re.ASCII):
            raise UserError(f"--hosts {text!r}: {host!r} is no host; write for example node0,node1 or me@10.0.0.1")
    if nodes is not None and len(hosts) < nodes:
        raise UserError(f"--hosts names {len(hosts)} of {nodes} nodes; name them all, or correct --nodes")
    chosen = hosts[:nodes]
    names = [host.rpartition("@")[2] for host in chosen]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"--hosts names {twice[0]} twice, and a host is one node; leave one out")
    return chosen


def meeting_place(hosts: Sequence[str], port: int) -> list[str]:
    """Return the options by which several nodes meet at the first host; none for a single host."""
    if len(hosts) == 1:
        return []
    first = Endpoint(hosts[0].rpartition("@")[2], port)
    return ["--nodes", str(len(hosts)), "--rdzv-endpoint", str(first)]


def ssh_text(job: ClusterJob, command: Sequence[str], hosts: Sequence[str], port: int) -> str:
    """Return a script that runs ``command`` on every host at once; its exit code is the largest of theirs.

    ssh does not forward signals. So the first host's launcher writes its process id to a file there. On SIGINT or
    SIGTERM the script sends SIGTERM to that process, which makes all ranks save.

    Args:
        job: The job, for the script's note.
        command: Command of each host.
        hosts: Hosts, one per node.
        port: Port at which the nodes meet, which also names the file of the process id.
    """
    number = f'"${{TMPDIR:-/tmp}}/imagenet-fast-{port}.pid"'
    start = f"exec {shlex.join(command)}"
    starts = [f"echo $$ >{number}; {start}", *[start] * (len(hosts) - 1)]
    lines = [f'{_SSH} {host} {shlex.quote(start)} & pids+=("$!")' for host, start in zip(hosts, starts, strict=True)]
    read = number.replace("$", r"\$").replace('"', r"\"")
    return _SCRIPT.format(note=job.note, ssh=_SSH, lines="\n".join(lines), first=hosts[0], number=read)


_SCRIPT = """\
#!/bin/bash
# {note}
#
# Ctrl-C, or SIGTERM to this shell, has all ranks save and end; started again, they go on where they were.

pids=()
{lines}

trap 'told=yes; {ssh} {first} "kill -s TERM \\$(cat {number})"' INT TERM
code=0
for pid in "${{pids[@]}}"; do
    while # a signal ends the waiting, not the ranks
        told=
        wait "$pid"
        ended=$?
        [ -n "$told" ]
    do :; done
    [ "$ended" -le "$code" ] || code=$ended
done
exit "$code"
"""
