#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hosts as network namespaces joined by a veth pair: what happens when the link is cut or a rank is killed.

  netns_test.py WORKER MPIRUN {whole|cut_link|killed_rank|killed_rank_no_recovery|killed_rank_one_host}

Exit code 77 (skipped) with a reason where namespaces are not permitted. Two hosts of two ranks each; mpirun runs on host a and starts
host b's daemon through an agent script in place of ssh. killed_rank_one_host needs no namespaces: four ranks over shared memory.
"""
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

TIMEOUT_MS = 5000
# Start of the wait to the error in the log, on a machine with more processes than cores.
GRACE_S = 15
NET = "10.213.7"


def skip(reason):
    print(f"SKIP: {reason}")
    sys.exit(77)


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True)


class Hosts:
    """Namespaces a and b; removed at the end."""

    def __init__(self, folder):
        self.names = {h: f"wb{os.getpid()}{h}" for h in "ab"}
        self.links = {h: f"wb{os.getpid() % 100000}{h}" for h in "ab"}
        self.agent = os.path.join(folder, "agent.sh")

    def __enter__(self):
        if os.geteuid() != 0:
            skip("network namespaces need root")
        if shutil.which("ip") is None:
            skip("the command ip (Debian: iproute2) is not installed")
        try:
            for name in self.names.values():
                run("ip", "netns", "add", name)
            run("ip", "link", "add", self.links["a"], "netns", self.names["a"], "type", "veth", "peer", self.links["b"], "netns", self.names["b"])
            for i, h in enumerate("ab", start=1):
                ip = ("ip", "-n", self.names[h])
                run(*ip, "address", "add", f"{NET}.{i}/24", "dev", self.links[h])
                run(*ip, "link", "set", self.links[h], "up")
                run(*ip, "link", "set", "lo", "up")
            run("ip", "netns", "exec", self.names["a"], "unshare", "--uts", "true")
        except subprocess.CalledProcessError as error:
            self.__exit__()
            skip(f"network namespaces are not permitted here: {' '.join(error.cmd)}: {error.stderr.strip()}")
        # mpirun calls: agent HOST COMMAND...; every host has a name of its own, as on real machines.
        with open(self.agent, "w", encoding="ascii") as script:
            script.write(f'#!/bin/sh\nshift\nexec ip netns exec {self.names["b"]} unshare --uts sh -c "hostname host-b; $*"\n')
        os.chmod(self.agent, 0o755)
        return self

    def __exit__(self, *_):
        for name in self.names.values():
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout.split()
            for pid in pids:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def command(self, mpirun, *arguments, ranks=2):
        """`ranks` processes on each host."""
        mca = {
            "plm_rsh_agent": self.agent, "btl": "tcp,self", "pml": "ob1", "btl_tcp_if_include": f"{NET}.0/24", "oob_tcp_if_include": f"{NET}.0/24",
            # Help texts of the daemons stay local: gathering them has crashed the launcher (4.1.4) while it dealt with a killed rank.
            "orte_keep_fqdn_hostnames": "1", "orte_base_help_aggregate": "0",
        }
        options = [word for key, value in mca.items() for word in ("--mca", key, value)]
        inner = " ".join([mpirun, "--allow-run-as-root", "-n", str(2 * ranks), "--host", f"{NET}.1:{ranks},{NET}.2:{ranks}", *options, *arguments])
        return ["ip", "netns", "exec", self.names["a"], "unshare", "--uts", "sh", "-c", f"hostname host-a; exec {inner}"]

    @staticmethod
    def local_command(mpirun, *arguments):
        return [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "4", *arguments]

    def cut(self):
        run("ip", "-n", self.names["a"], "link", "set", self.links["a"], "down")


def read_log(folder, rank):
    try:
        with open(os.path.join(folder, f"rank_{rank}.log"), encoding="utf-8") as log:
            return log.read()
    except FileNotFoundError:
        return ""


def wait_until(what, seconds, condition, job):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        if job.poll() is not None and not condition():
            break
        time.sleep(0.05)
    if not condition():
        raise AssertionError(f"{what}: not within {seconds} s (launcher: {job.poll()})")


def expect_error(folder, rank, peers):
    """The survivor's log names rank, peer and phase, and came within the timeout."""
    text = read_log(folder, rank)
    match = re.search(r"error (\S+) after (\d+) ms: (.*)", text)
    assert match, f"rank {rank} gave no error: {text!r}"
    print(f"rank {rank}: {match.group(0)}")
    assert match.group(1) in ("timeout", "peer_failed"), match.group(1)
    assert int(match.group(2)) <= TIMEOUT_MS + GRACE_S * 1000, match.group(2)
    message = match.group(3)
    assert re.search(r"'(dispatch rows[a-z ]*|combine rows[a-z ]*|plan [a-z]+|go on)'", message), f"no phase: {message}"
    assert re.search(r"rank \d", message), f"no rank: {message}"
    named = {int(n) for group in re.findall(r"ranks? (\d+(?:, \d+)*)", message) for n in group.split(", ")}
    assert named & set(peers), f"none of the lost ranks {peers} is named: {message}"


def main():
    worker, mpirun, case = sys.argv[1:4]
    one_host = case == "killed_rank_one_host"
    with tempfile.TemporaryDirectory() as folder, contextlib.nullcontext(Hosts) if one_host else Hosts(folder) as hosts:
        seconds = 2 if case == "whole" else 50
        extra = ["--enable-recovery"] if case in ("killed_rank", "killed_rank_one_host") else []
        command = hosts.local_command if one_host else hosts.command
        log_path = os.path.join(folder, "mpirun.log")
        with open(log_path, "w", encoding="utf-8") as log:
            job = subprocess.Popen(command(mpirun, *extra, worker, folder, str(TIMEOUT_MS), str(seconds)), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            ready = lambda: all("ready" in read_log(folder, r) for r in range(4))  # noqa: E731
            wait_until("all ranks exchange", 25, ready, job)
            assert one_host or [int(re.search(r"node (\d+)", read_log(folder, r)).group(1)) for r in range(4)] == [0, 0, 1, 1], "two hosts were not seen"
            errors = lambda ranks: all("error" in read_log(folder, r) for r in ranks)  # noqa: E731
            if case == "whole":
                wait_until("the end", 25, lambda: job.poll() is not None, job)
                assert job.returncode == 0, job.returncode
                assert all("end" in read_log(folder, r) for r in range(4))
            elif case == "cut_link":
                hosts.cut()
                wait_until("errors on every rank", TIMEOUT_MS / 1000 + GRACE_S, lambda: errors(range(4)), job)
                for rank, peers in ((0, (2, 3)), (1, (2, 3)), (2, (0, 1)), (3, (0, 1))):
                    expect_error(folder, rank, peers)
            else:
                os.kill(int(re.search(r"pid (\d+)", read_log(folder, 3)).group(1)), signal.SIGKILL)
                if case != "killed_rank_no_recovery":
                    wait_until("errors on the survivors", TIMEOUT_MS / 1000 + GRACE_S, lambda: errors(range(3)), job)
                    for rank in range(3):
                        expect_error(folder, rank, (3,))
                else:
                    wait_until("the launcher's end", TIMEOUT_MS / 1000 + GRACE_S, lambda: job.poll() is not None, job)
                    assert job.returncode != 0, "the launcher reported success"
                    with open(log_path, encoding="utf-8", errors="replace") as log:
                        text = log.read()
                    assert re.search(r"rank 3\b", text), f"the launcher's log does not name rank 3:\n{text}"
                    print(f"launcher: exit {job.returncode}; {[line for line in text.splitlines() if 'rank 3' in line][0].strip()}")
        except BaseException:
            with open(log_path, encoding="utf-8", errors="replace") as log:
                print(f"--- mpirun ---\n{log.read()}\n--- ranks ---")
            for r in range(4):
                print(f"[{r}] {read_log(folder, r)}")
            raise
        finally:
            if job.poll() is None:
                job.kill()
            job.wait()
    print(f"{case}: passed")


if __name__ == "__main__":
    main()
