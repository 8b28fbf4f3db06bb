#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""waybill train as processes: train_test.py WAYBILL MPIRUN CONFIG {equal|refusals}

equal: `mpirun -n 4 waybill train` gives the losses, gradient norms and checkpoint tensors of 4 rank threads, bit for bit; only rank 0
prints. refusals: what every rank refuses is said once, and the launcher's exit code is not 0.
"""
import json
import os
import subprocess
import sys
import tempfile

WORDS = ["waybill", "token", "expert", "rank", "route", "the", "a", "of", "to", "and", "dispatch", "combine"]


def made_text(count):
    state, words = 1, []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        words.append(WORDS[(state >> 33) % len(WORDS)])
    return " ".join(words)


def metrics(run):
    """Per step and evaluation what must be equal; times and rates are left out."""
    keys = ("kind", "step", "loss", "aux_loss", "grad_norm", "lr", "bytes")
    with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    return [{key: line.get(key) for key in keys} for line in found if line["kind"] in ("step", "eval")]


def tensors(run):
    folder = os.path.join(run, "checkpoints")
    with open(os.path.join(folder, "latest"), encoding="utf-8") as latest:
        step = latest.read().strip()
    with open(os.path.join(folder, step, "index.json"), encoding="utf-8") as index:
        return {t["name"]: t["crc"] for t in json.load(index)["body"]["tensors"]}


def main():
    waybill, mpirun, config, case = sys.argv[1:5]
    launch = [mpirun, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "4", waybill]
    with tempfile.TemporaryDirectory() as folder:
        text = os.path.join(folder, "text.txt")
        with open(text, "w", encoding="ascii") as out:
            out.write(made_text(4000))
        settings = {"parallel.P": 2, "parallel.D": 2, "train.steps": 4, "train.warmup_steps": 2, "train.checkpoint_every": 0, "train.eval_every": 2,
                    "train.eval_sequences": 4,
                    "train.final_eval_sequences": 4, "train.sample_tokens": 4, "train.measure_ceiling": "false", "train.threads": 1, "train.timeout_s": 40,
                    "moe.shared_F": 16}

        def train(command, run, **changes):
            sets = [word for key, value in {**settings, **changes}.items() for word in ("--set", f"{key}={value}")]
            words = [*command, "train", config, "--text", text, "--run-dir", os.path.join(folder, run), *sets]
            return subprocess.run(words, capture_output=True, text=True, check=False, timeout=50)

        if case == "equal":
            for command, run in (([waybill], "threads"), (launch, "processes")):
                done = train(command, run)
                assert done.returncode == 0, f"{run}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
                assert done.stdout.count("trained 4 steps") == 1, f"{run} printed the result {done.stdout.count('trained 4 steps')} times:\n{done.stdout}"
            a, b = (os.path.join(folder, run) for run in ("threads", "processes"))
            assert len(metrics(a)) >= 6, metrics(a)
            assert metrics(a) == metrics(b), f"{metrics(a)}\n{metrics(b)}"
            assert tensors(a) and tensors(a) == tensors(b)
            print(f"losses {[m['loss'] for m in metrics(b) if m['kind'] == 'step']}, {len(tensors(b))} tensors: equal")
        else:
            # Another number of processes than the config's, and a bad key.
            for changes, said in (({"parallel.D": 1}, "4 processes were started, but the config says P = 2, D = 1"), ({"moe.K": 0}, "K = 0")):
                done = train(launch, "refused", **changes)
                assert done.returncode != 0
                everything = done.stdout + done.stderr
                assert everything.count(said) == 1, f"'{said}' {everything.count(said)} times:\n{everything}"
            print("refused once, in words")
    print(f"{case}: passed")


if __name__ == "__main__":
    main()
