"""Shell script for nodes that are reached by ssh, with one ssh per node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from imagenet_fast.distributed.network import Endpoint
from imagenet_fast.errors import UserError
from imagenet_fast.launch.cluster_job import ClusterJob

_SSH = "ssh -n -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o ServerAliveCountMax=8"
"""Without BatchMode it would wait for a password that no user can enter, without the others for a node that died."""
_PID = '"$HOME/.imagenet-fast-$0.pid"'  # not in /tmp, where others could have left a link of that name


def parse_hosts(text: str, nodes: int | None) -> list[str]:
    """Return the first ``nodes`` hosts of a list like ``a,user@b,fd00::1``; None for all. Raises UserError."""
    hosts = [host.strip() for host in text.split(",")]
    for host in hosts:
        if not re.fullmatch(r"(?:[A-Za-z0-9_][\w.+-]*@)?[A-Za-z0-9_:][A-Za-z0-9_.:-]*", host, re.ASCII):
            raise UserError(f"--hosts {text!r}: {host!r} is no host; write for example node0,node1 or me@10.0.0.1")
        if ":" in host and not _is_address(host.rpartition("@")[2]):
            raise UserError(f"--hosts {text!r}: {host!r} has a port; write it into ~/.ssh/config, as Port of this host")
    if nodes is not None and len(hosts) < nodes:
        raise UserError(f"--hosts names {len(hosts)} of {nodes} nodes; name them all, or correct --nodes")
    chosen = hosts[:nodes]
    names = [host.rpartition("@")[2] for host in chosen]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"--hosts names {twice[0]} twice, and a host is one node; leave one out")
    if len(names) > 1 and (names[0] == "localhost" or (_is_address(names[0]) and ip_address(names[0]).is_loopback)):
        raise UserError(f"--hosts {text!r}: to the others {names[0]} is themselves; give the name that they know it by")
    return chosen


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def meeting_place(hosts: Sequence[str], port: int) -> list[str]:
    """Return the options by which several nodes meet at the first host; none for a single host."""
    if len(hosts) == 1:
        return []
    first = Endpoint(hosts[0].rpartition("@")[2], port)
    return ["--nodes", str(len(hosts)), "--rdzv-endpoint", str(first)]


def ssh_text(job: ClusterJob, command: Sequence[str], hosts: Sequence[str]) -> str:
    """Return a script that runs ``command`` on every host at once; its exit code is the largest of theirs.

    ssh does not forward signals. So the first host's launcher writes its process id to a file there, which is named
    after this start of the script. On SIGINT or SIGTERM the script sends SIGTERM to that process, and all ranks save.

    Commands run in the directory from which the script was made, where a host has it. They are given to sh, since the
    users' own shells may be others.

    Args:
        job: The job, for the script's note.
        command: Command of each host.
        hosts: Hosts, one per node.
    """
    start = f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null; exec {shlex.join(command)}"
    starts = [f"echo $$ >{_PID}; {start}", *[start] * (len(hosts) - 1)]
    lines = [f'{_remote(host, start)} & pids+=("$!")' for host, start in zip(hosts, starts, strict=True)]
    stop, clear = (_remote(hosts[0], words) for words in (f'kill -s TERM "$(cat {_PID})"', f"rm -f {_PID}"))
    return _SCRIPT.format(note=job.note, lines="\n".join(lines), stop=stop, clear=clear)


def _remote(host: str, words: str) -> str:
    """Return the command by which sh runs ``words`` on ``host``; its $0 is the name of this start."""
    return f'{_SSH} {host} {shlex.quote(f"exec sh -c {shlex.quote(words)} ")}"$start"'


_SCRIPT = """\
#!/bin/bash
# {note}
#
# Ctrl-C, or SIGTERM to this shell, has all ranks save and end; started again, they go on where they were.

start=$(hostname)-$$-$(date +%s)
pids=()
{lines}

# shellcheck disable=SC2329 # the trap calls it
stop() {{
    told=yes
    {stop}
}}
trap stop INT TERM
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
{clear}
exit "$code"
"""
