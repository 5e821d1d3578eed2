"""Links of the emulated cluster: a NIC per rank on the fabric, and one inside its node.

Every rank is a network namespace "r<rank>" with two interfaces: `ib` is connected to the spine of
all ranks, `nv` to the switch of the node. Both ends are shaped to the rate of their class, so a NIC
is full duplex and receives at the rate at which it sends. Host routes send traffic for a peer on
the same node over `nv` and all other traffic over `ib`, so one gloo group with `ib` addresses uses
both kinds of links. Other wirings give pairs of ranks their own links. Used inside an `enclosure`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .enclosure import run

INTERFACES = {"inter": "ib", "intra": "nv"}  # link class -> interface of a rank
# Pairs of ranks with their own link in addition to NICs; a link is as fast as its class.
WIRINGS = {
    "nic": "one NIC per rank and link class",
    "node": "a direct link for every pair of ranks of a node, NICs between nodes",
    "mesh": "a direct link for every pair of ranks",
}
PACKET = 65536  # bytes per packet; smaller packets need more CPU time than 2 cores have
AHEAD = 1e-3  # seconds of a link that fit into the buffer of a socket
SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True)
class Rates:
    """Bits per second of a link in each direction."""

    inter: int
    intra: int

    @classmethod
    def parse(cls, text: str) -> Rates:
        """Parse "200M/800M": inter, then intra."""
        parts = re.fullmatch(r"(\d+)([KMG]?)/(\d+)([KMG]?)", text)
        if parts is None:
            raise ValueError(f"rates must look like 200M/800M (inter/intra, bit/s), got {text!r}")
        inter, intra = (int(parts[i]) * SUFFIXES[parts[i + 1]] for i in (1, 3))
        return cls(inter, intra)

    def __str__(self) -> str:
        return f"{_short(self.inter)}/{_short(self.intra)}"

    def of(self, link: str) -> int:
        return self.inter if link == "inter" else self.intra


@dataclass(frozen=True)
class Network:
    """`nodes` nodes of `per_node` ranks with links of `rates`; `build` creates it.

    Attributes:
        wiring: One of `WIRINGS`.
    """

    nodes: int
    per_node: int
    rates: Rates
    wiring: str = "nic"

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    def address(self, rank: int) -> str:
        """Return the address of the rank's `ib` interface, the only one that peers know."""
        return f"10.0.0.{rank + 1}"

    def link(self, rank: int, peer: int) -> str:
        """Return the link class between two ranks."""
        return "intra" if rank // self.per_node == peer // self.per_node else "inter"

    def direct(self, rank: int, peer: int) -> bool:
        """Return true if these two ranks have their own link."""
        of_node = self.wiring == "node" and self.link(rank, peer) == "intra"
        return rank != peer and (self.wiring == "mesh" or of_node)

    def peers(self, rank: int) -> Iterator[int]:
        """Return the ranks with which the rank has its own link."""
        return (peer for peer in range(self.size) if self.direct(rank, peer))

    def interfaces(self, rank: int) -> dict[str, str]:
        """Map each interface of the rank to its link class."""
        pairs = {f"p{peer}": self.link(rank, peer) for peer in self.peers(rank)}
        return {name: link for link, name in INTERFACES.items()} | pairs

    def loads(self, sent: np.ndarray, link: str) -> np.ndarray:
        """Return bytes that every interface of a class carries one way for `sent` [src, dst] bytes.

        A NIC carries all traffic of its rank, a direct link its pair's traffic.
        """
        ranks = range(self.size)
        of_class = np.array([[i != j and self.link(i, j) == link for j in ranks] for i in ranks])
        pairs = np.array([[self.direct(i, j) for j in ranks] for i in ranks])
        shared = np.where(of_class & ~pairs, sent, 0)
        return np.concatenate([shared.sum(axis=0), shared.sum(axis=1), sent[of_class & pairs]])

    def build(self) -> None:
        bridges = ["spine", *(f"node{node}" for node in range(self.nodes))]
        lines = [f"link add {name} type bridge\nlink set {name} up" for name in bridges]
        for rank in range(self.size):
            lines.append(f"netns add r{rank}")
            for name, bridge in (("ib", "spine"), ("nv", f"node{rank // self.per_node}")):
                lines += [
                    f"link add {name}{rank} type veth peer name {name} netns r{rank}",
                    f"link set {name}{rank} gso_max_size {PACKET}",
                    f"link set {name}{rank} master {bridge}",
                    f"link set {name}{rank} up",
                ]
        for rank in range(self.size):
            for peer in (peer for peer in self.peers(rank) if peer > rank):
                ends = f"name p{peer} netns r{rank} type veth peer name p{rank} netns r{peer}"
                lines.append(f"link add {ends}")
        run("ip", "-batch", "-", stdin_text="\n".join(lines) + "\n")
        for rank in range(self.size):
            self._furnish(rank)
        for link in INTERFACES:
            self.shape(link, range(self.size), self.rates.of(link))

    def destroy(self) -> None:
        """Remove the network, so that another one can be built in the same enclosure."""
        # Links first: the kernel removes links of a deleted namespace only later.
        for rank in range(self.size):
            pairs = [f"link del p{peer}" for peer in self.peers(rank) if peer > rank]
            run("ip", "-n", f"r{rank}", "-force", "-batch", "-", stdin_text="\n".join(pairs) + "\n")
        names = [f"{name}{rank}" for name in INTERFACES.values() for rank in range(self.size)]
        names += ["spine", *(f"node{node}" for node in range(self.nodes))]
        lines = [f"link del {name}" for name in names]
        lines += [f"netns del r{rank}" for rank in range(self.size)]
        run("ip", "-force", "-batch", "-", stdin_text="\n".join(lines) + "\n")

    def shape(self, link: str, ranks: range | list[int], rate: int) -> None:
        """Change the rate of one link class of these ranks.

        A NIC is shaped at both ends, a direct link for what these ranks send.
        """
        shaper = f"root tbf rate {rate}bit burst {2 * PACKET} limit 4mb"
        outside = [f"qdisc replace dev {INTERFACES[link]}{rank} {shaper}" for rank in ranks]
        run("tc", "-batch", "-", stdin_text="\n".join(outside) + "\n")
        for rank in ranks:
            inside = [
                f"qdisc replace dev {name} {shaper}"
                for name, of in self.interfaces(rank).items()
                if of == link
            ]
            run("tc", "-n", f"r{rank}", "-batch", "-", stdin_text="\n".join(inside) + "\n")

    def cut(self, link: str, rank: int) -> None:
        """Take the switch's end of a link down, like a pulled cable."""
        run("ip", "link", "set", f"{INTERFACES[link]}{rank}", "down")

    def mend(self, link: str, rank: int) -> None:
        run("ip", "link", "set", f"{INTERFACES[link]}{rank}", "up")

    def counted(self, rank: int) -> dict[str, int]:
        """Return bytes sent by each interface of a rank, from the counters of the kernel."""
        links = json.loads(run("ip", "-n", f"r{rank}", "-s", "-j", "link", "show"))
        return {entry["ifname"]: entry["stats64"]["tx"]["bytes"] for entry in links}

    def sent_bytes(self, rank: int) -> dict[str, int]:
        """Return bytes sent by a rank, by link class."""
        return self._by_class(rank, self.counted(rank))

    def sent_from_here(self, rank: int) -> dict[str, int]:
        """Return `sent_bytes`, read inside the namespace of `rank`."""
        lines = Path("/proc/self/net/dev").read_text().splitlines()
        sent = {
            line.split(":")[0].strip(): int(line.split(":")[1].split()[8]) for line in lines[2:]
        }
        return self._by_class(rank, sent)

    def _by_class(self, rank: int, sent: dict[str, int]) -> dict[str, int]:
        total = dict.fromkeys(INTERFACES, 0)
        for name, link in self.interfaces(rank).items():
            total[link] += sent[name]
        return total

    def _furnish(self, rank: int) -> None:
        """Set addresses, routes and TCP settings of one rank's namespace."""
        address = self.address(rank)
        lines = [
            "link set lo up",
            f"addr add {address}/24 dev ib",
            f"addr add 10.1.0.{rank + 1}/24 dev nv",
        ]
        lines += [f"link set {name} up gso_max_size {PACKET}" for name in self.interfaces(rank)]
        for peer in range(self.size):
            if self.direct(rank, peer):
                lines.append(f"route add {self.address(peer)}/32 dev p{peer} src {address}")
            elif peer != rank and self.link(rank, peer) == "intra":
                lines.append(f"route add {self.address(peer)}/32 dev nv src {address}")
        run("ip", "-n", f"r{rank}", "-batch", "-", stdin_text="\n".join(lines) + "\n")
        # BBR is slow for two-level rings; every kernel has Reno. No slow start after idle times. A
        # rank's own thread copies all data that fit into the socket's buffer, up to the receiver's
        # socket. For half a megabyte this takes half a millisecond, which a real NIC would not need
        # from a rank. So the buffer is small, and gloo's thread copies the remaining data.
        ahead = max(2 * PACKET, int(AHEAD * self.rates.intra / 8))
        settings = {
            "tcp_congestion_control": "reno",
            "tcp_slow_start_after_idle": "0",
            "tcp_wmem": f"4096 {ahead} {ahead}",
        }
        script = "; ".join(f"echo '{v}' > /proc/sys/net/ipv4/{k}" for k, v in settings.items())
        run("ip", "netns", "exec", f"r{rank}", "sh", "-ec", script)


def _short(rate: int) -> str:
    for suffix in ("G", "M", "K"):
        if rate % SUFFIXES[suffix] == 0:
            return f"{rate // SUFFIXES[suffix]}{suffix}"
    return str(rate)
