"""Find the processes that answer at an address, if they run on this machine.

By Linux's tables of sockets (proc(5)); on other systems nothing is known.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from quantmill.devices import processes

PROC = processes.PROC
LISTENING = "0A"  # a state of /proc/net/tcp
# they forward requests; the kernel truncates names to 15 characters
PASSAGES = {"apache2", "caddy", "cloudflared", "envoy", "frpc", "gvproxy", "haproxy", "httpd", "kubectl", "nginx"}
PASSAGES |= {"pasta", "pasta.avx2", "socat", "ssh", "sshd", "sshd-session", "stunnel", "tailscaled", "traefik"}
OF_CONTAINERS = {"docker-proxy", "rootlessport", "slirp4netns"}  # they forward requests to a container of this machine
PORTS = {"http": 80, "https": 443}
DISTURBANCE = "disturbance"  # key among an engine's versions: the reason why interference is unknown
UNKNOWN = "so interference from other programs is unknown"
Address = IPv4Address | IPv6Address


@dataclass(frozen=True)
class Answering:
    """The server at an address.

    Attributes:
        place: this machine, another one, or unknown.
        pids: its processes, without their descendants; empty if unknown.
        unknown: the reason why they are unknown, in words; None if they are known.
    """

    place: Literal["here", "elsewhere", "unknown"]
    pids: frozenset[int] = field(default_factory=frozenset)
    unknown: str | None = None

    def processes(self) -> set[int]:
        """Return its processes and their descendants that run now."""
        return processes.tree(self.pids)


@dataclass(frozen=True)
class Listener:
    """A listening socket: its address and its inode."""

    address: Address
    inode: str


def of_options(options: Mapping[str, Any]) -> Answering | None:
    """Find the server at the `url` of an engine's options; None for an engine without one, which is our own process."""
    return find(options["url"]) if "url" in options else None


def find(url: object) -> Answering | None:
    """Find the server at a URL; None for an invalid URL, which others refuse."""
    try:
        parts = urlsplit(str(url))
        port = parts.port or PORTS[parts.scheme]
        host = parts.hostname or ""
    except (ValueError, KeyError):
        return None
    addresses = _addresses(host)
    if not any(map(_is_here, addresses)):
        for address in addresses:
            if found := _of_container(address, port):
                return found
        return Answering("elsewhere", unknown=f"the server runs on another host, {UNKNOWN}")
    for address in filter(_is_here, addresses):
        if listeners := _at(address, _listeners(PROC / "net", port)):
            return _describe(listeners)
    return Answering("unknown", unknown=f"no process of this machine listens on port {port}, {UNKNOWN}")


def on_port(port: int) -> set[int]:
    """Return the processes that listen on a TCP port of this machine, of those that this user may inspect."""
    found = _owners({each.inode for each in _listeners(PROC / "net", port)})
    return set().union(*found.values())


def _describe(listeners: list[Listener]) -> Answering:
    """Describe the server on listening sockets of this machine."""
    owners = _owners({each.inode for each in listeners})
    found = set().union(*owners.values())
    names = {_name(pid) for pid in found}
    if passages := names & (OF_CONTAINERS | PASSAGES):
        for pid in found if passages & OF_CONTAINERS else ():
            if inside := _behind(pid):
                return inside
        unknown = f"{min(passages)} forwards requests to the server, {UNKNOWN}"
        return Answering("here" if passages & OF_CONTAINERS else "unknown", unknown=unknown)
    if not all(owners.values()):
        return Answering("here", unknown=f"the server's processes are another user's, {UNKNOWN}")
    return Answering("here", frozenset(map(_head, found)))


def _behind(pid: int) -> Answering | None:
    """Find the server in the container to which a docker-proxy forwards; None if it cannot be seen."""
    with suppress(OSError, ValueError):
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        told = dict(pairwise(words))
        if "-container-ip" in told and "-container-port" in told:
            return _of_container(ip_address(told["-container-ip"]), int(told["-container-port"]))
    return None


def _of_container(address: Address, port: int) -> Answering | None:
    """Find the server at an address of another network namespace of this machine, such as a container's."""
    seen = {_link(PROC / "self/ns/net")}
    for folder in sorted(PROC.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        namespace = _link(folder / "ns/net")
        if namespace in seen:
            continue
        seen.add(namespace)
        if address in _own_addresses(folder / "net") and (listeners := _at(address, _listeners(folder / "net", port))):
            return _describe(listeners)
    return None


def _addresses(host: str) -> list[Address]:
    """Resolve a host's name, in the order of connection attempts; empty if it is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(ip_address(str(each[4][0]).partition("%")[0]) for each in found))
    except (OSError, ValueError):  # UnicodeError, for impossible names, is a ValueError
        return []


def _is_here(address: Address) -> bool:
    """Return whether an address is one of this machine: a socket can bind to no other."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.bind((str(address), 0))
        return True
    except OSError:
        return False


def _own_addresses(net: Path) -> set[Address]:
    """Return the addresses of a network namespace, by its tables."""
    found: set[Address] = set()
    lines = _lines(net / "fib_trie")
    for before, line in pairwise(lines):
        if line.strip() == "/32 host LOCAL":
            found.add(ip_address(before.split()[-1]))
    return found | {ip_address(bytes.fromhex(line.split()[0])) for line in _lines(net / "if_inet6")}


def _listeners(net: Path, port: int) -> list[Listener]:
    """Return all sockets that listen on a TCP port."""
    fields = [line.split() for name in ("tcp", "tcp6") for line in _lines(net / name)[1:]]
    found = []
    for each in fields:
        where, _, at = each[1].partition(":")
        if each[3] == LISTENING and int(at, 16) == port:
            found.append(Listener(_decode(where), each[9]))
    return found


def _decode(digits: str) -> Address:
    """Decode an address as the kernel prints it: words of four bytes in the machine's (little-endian) order."""
    words = [bytes.fromhex(digits[place : place + 8])[::-1] for place in range(0, len(digits), 8)]
    address = ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address


def _at(address: Address, listeners: list[Listener]) -> list[Listener]:
    """Return the listeners that a connection reaches: bound to the address, else to all of its family, else to all."""
    if address.is_unspecified:
        return listeners
    kinds = (ip_address("0.0.0.0"), ip_address("::")) if address.version == 4 else (ip_address("::"),)
    return next(
        (found for each in (address, *kinds) if (found := [one for one in listeners if one.address == each])), []
    )


def _owners(inodes: set[str]) -> dict[str, set[int]]:
    """Return the processes that hold each socket, of those that this user may inspect."""
    found: dict[str, set[int]] = {inode: set() for inode in inodes}
    for descriptor in _descriptors():
        with suppress(OSError):  # it has ended, or is another user's
            inode = str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]")
            if inode in found:
                found[inode].add(int(descriptor.parts[-3]))
    return found


def _descriptors() -> Iterator[Path]:
    for folder in PROC.glob("[0-9]*/fd"):
        with suppress(OSError):
            yield from list(folder.iterdir())


def _head(pid: int) -> int:
    """Return the topmost process of a server: launchers (vLLM, TGI, MPI) start workers next to the listener.

    Ascends from parent to parent within one session, but not to an ancestor of this process, nor from a job to its
    terminal's shell, which gives each job a process group.
    """
    ours = set(_ancestors(os.getpid()))
    for above in _ancestors(pid)[1:]:
        one, other = processes.stat(pid), processes.stat(above)
        if one is None or other is None or above in ours:
            break
        group, session, terminal = (one[place] for place in (processes.GROUP, processes.SESSION, processes.TERMINAL))
        if other[processes.SESSION] != session:
            break
        if other[processes.GROUP] != group and str(above) == session and terminal != "0":
            break
        pid = above
    return pid


def _ancestors(pid: int) -> list[int]:
    """Return a process, its parent, and so on up to the first."""
    found = []
    while pid and pid not in found:
        found.append(pid)
        stat = processes.stat(pid)
        pid = int(stat[processes.PARENT]) if stat else 0
    return found


def _name(pid: int) -> str:
    with suppress(OSError):
        return (PROC / str(pid) / "comm").read_text(errors="replace").strip()
    return ""


def _link(path: Path) -> str:
    with suppress(OSError):
        return str(path.readlink())
    return ""


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(encoding="ascii").splitlines()
    return []
