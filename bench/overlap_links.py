#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""overlap_bench with two ranks as processes, over shared memory and over two hosts (network namespaces) whose link has a given rate.

  bench/overlap_links.py OVERLAP_BENCH [--link memory|NUMBER of Gbit/s]... [-- options of overlap_bench]

Needs root and iproute2 for rates; the rate is a token bucket on both ends of the veth pair. Links one after another, ranks bound to nothing.
"""
import argparse
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests/fabric/mpi"))
from netns_test import Hosts  # noqa: E402


def limit(hosts, gbits):
    for host in "ab":
        subprocess.run(["ip", "netns", "exec", hosts.names[host], "tc", "qdisc", "replace", "dev", hosts.links[host], "root", "tbf", "rate", f"{gbits}gbit",
                        "burst", "256kb", "latency", "50ms"], check=True)  # fmt: skip


def over_memory(mpirun, command):
    return subprocess.run([mpirun, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2", *command], check=False).returncode


def over_link(mpirun, gbits, command):
    with tempfile.TemporaryDirectory() as folder, Hosts(folder) as hosts:
        limit(hosts, gbits)
        return subprocess.run(hosts.command(f"{mpirun} --bind-to none", *command, ranks=1), check=False).returncode


def main():
    own, _, rest = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(description="What the overlap saves over links of several rates.")
    parser.add_argument("binary")
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("--link", action="append", metavar="memory|GBITS")
    options = parser.parse_args(own.split())
    command = [str(pathlib.Path(options.binary).absolute()), *rest.split()]
    result = 0
    for link in options.link or ["memory", "10", "1"]:
        print(f"== {'shared memory' if link == 'memory' else f'two hosts, {link} Gbit/s'}", flush=True)
        result |= over_memory(options.mpirun, command) if link == "memory" else over_link(options.mpirun, link, command)
    return result


if __name__ == "__main__":
    sys.exit(main())
