"""Smallest cluster, to check if this machine can emulate one: 2 nodes of 2 ranks.

It prints measured and shaped rates of its links, including direct links if the wiring has them.
`check` and the tests run it.
"""

from __future__ import annotations

import os

from .bench import built
from .network import Network, Rates

SIZE = 2**24  # bytes; much more than the shapers send at once


def main(wiring: str = "nic") -> int:
    from . import measure
    from .ranks import Ranks

    network = Network(2, 2, Rates.parse("50M/200M"), wiring)
    with built(network), Ranks(network) as ranks:
        print("namespace", os.readlink("/proc/self/ns/net"), flush=True)
        for _ in range(2):  # the first round opens the connections
            sent_before = [network.sent_bytes(rank) for rank in range(network.size)]
            clocks = ranks.run(measure.transfer, dict.fromkeys(("inter", "intra"), SIZE))
            sent_after = [network.sent_bytes(rank) for rank in range(network.size)]
        counted = network.counted(0)
        for link in ("inter", "intra"):
            ends = [clock[link] for clock in clocks]
            seconds = max(end for _, end in ends) - min(begin for begin, _ in ends)
            sent = sum(b[link] - a[link] for a, b in zip(sent_before, sent_after, strict=True))
            reached, shaped = 8e-6 * SIZE / seconds, network.rates.of(link) / 1e6
            names = [name for name, name_link in network.interfaces(0).items() if name_link == link]
            used_names = [name for name in names if counted[name] > SIZE]
            print(
                f"{link} by {' and '.join(used_names)}: {reached:.1f} of {shaped:.0f} Mbit/s, "
                f"{sent} bytes by the kernel for {network.size * SIZE} of payload"
            )
    return 0
