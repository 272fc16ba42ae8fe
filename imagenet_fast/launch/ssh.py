"""Shell script for nodes that are reached by ssh, with one ssh per node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from imagenet_fast.errors import UserError, listed
from imagenet_fast.launch.cluster_job import ClusterJob

_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o ServerAliveCountMax=8"
"""Without BatchMode it would wait for a password that no user can enter, without the others for a node that died."""

_SCRIPT = """\
#!/bin/bash
# {note}
#
# Ctrl-C, or SIGTERM to this shell, has all ranks save and end; started again, they go on where they were.

trap '' INT PIPE # also in ssh, which Ctrl-C must not end, and where the first host has ended
pids=()
{others}exec 3> >({first})
pids+=("$!")

trap 'echo stop >&3' INT TERM
code=0
for pid in "${{pids[@]}}"; do
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done # a signal ends the waiting, not the ranks
    wait "$pid"; ended=$?
    [ "$ended" -le "$code" ] || code=$ended
done
exit "$code"
"""


def parse_hosts(text: str, nodes: int | None) -> list[str]:
    """Return the first ``nodes`` hosts of a list like ``a,user@b,fd00::1``; None for all. Raises UserError."""
    names = listed("--hosts", text, _name)[:nodes]
    if nodes is not None and len(names) < nodes:
        raise UserError(f"--hosts names {len(names)} of {nodes} nodes; name them all, or correct --nodes")
    if len(names) > 1 and (names[0] == "localhost" or names[0].startswith("127.") or names[0] == "::1"):
        raise UserError(f"--hosts {text!r}: to the others {names[0]} is themselves; give the name that they know it by")
    return [host.strip() for host in text.split(",")][:nodes]


def _name(host: str) -> str:
    """Return the name or address of a host that may begin with ``user@``."""
    if re.fullmatch(r"[^:]+:[0-9]+", host):
        raise UserError(f"--hosts: {host!r} has a port; write it into ~/.ssh/config, as Port of this host")
    if not re.fullmatch(r"(?:[A-Za-z0-9_][\w.+-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9A-Fa-f:.]+)", host, re.ASCII):
        raise UserError(f"--hosts: {host!r} is no host; write for example node0,node1 or me@10.0.0.1")
    return host.rpartition("@")[2]


def ssh_text(job: ClusterJob, command: Sequence[str], hosts: Sequence[str]) -> str:
    """Return a script for bash 4.4 that runs ``command`` on every host at once; its exit code is the largest of theirs.

    ssh does not forward signals. On SIGINT or SIGTERM the script writes a line to the first host, where a shell reads
    it and sends SIGTERM to the launcher; then all ranks save.

    Commands run in the directory from which the script was made, where a host has it. They are given to sh, since the
    users' own shells may be others.
    """
    start = f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null; exec {shlex.join(command)}"
    stop = "(read -r _ && kill -s TERM $pid) <&3 >/dev/null 2>&1"
    first = f"exec 3<&0; ({start}) </dev/null & pid=$!; {stop} & wait $pid"
    others = [f'{_remote(host, start)} </dev/null & pids+=("$!")\n' for host in hosts[1:]]
    return _SCRIPT.format(note=job.note, others="".join(others), first=_remote(hosts[0], first))


def _remote(host: str, words: str) -> str:
    return f"{_SSH} {host} {shlex.quote(f'exec sh -c {shlex.quote(words)}')}"
