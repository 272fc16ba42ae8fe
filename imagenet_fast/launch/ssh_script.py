"""Plain lines for hosts that ssh reaches: a script of one ssh a host."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from imagenet_fast.distributed.network_interfaces import Endpoint
from imagenet_fast.errors import UserError
from imagenet_fast.launch.cluster_job import ClusterJob

_SSH = "ssh -n -o BatchMode=yes"  # which would wait for a password where nobody sees it


def parse_hosts(text: str, nodes: int | None) -> list[str]:
    """The first ``nodes`` of hosts like ``a,user@b,fd00::1``; None for all. Raises UserError."""
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
    """The options by which several nodes find each other: at the first host."""
    if len(hosts) == 1:
        return []
    first = Endpoint(hosts[0].rpartition("@")[2], port)
    return ["--nodes", str(len(hosts)), "--rdzv-endpoint", str(first)]


def ssh_text(job: ClusterJob, command: Sequence[str], hosts: Sequence[str], port: int) -> str:
    """A script that runs ``command`` on every host at once, and ends as the worst of them.

    A signal does not travel through ssh. The first host's launcher therefore leaves its number there, by which SIGINT
    and SIGTERM to the script are passed on to it as SIGTERM; it has all ranks save.
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
