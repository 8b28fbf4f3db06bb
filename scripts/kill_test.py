#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills a training run with SIGKILL at random instants, many of them inside the writing of a checkpoint, and confirms that the last good
checkpoint always loads.

  scripts/kill_test.py --binary build/cpu/tools/waybill/waybill [--kills 100] [--seed 1] [--folder DIR] [--set moe.recipe=nvfp4]...

The run saves after every step. Each trial resumes it, waits for at least one new checkpoint, and kills: half of the trials after a random
time, half at a random time after a save was seen to begin. After each kill the newest checkpoint must not be older than before and must
pass `waybill inspect checkpoint` (every byte against its checksum). At the end the weights and moments must equal, bit for bit, those of
a run that was never disturbed: no resume started from anything but the state that was saved.
"""
import argparse
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SETTINGS = ["train.checkpoint_every=1", "train.keep_checkpoints=2", "train.eval_every=0", "train.final_eval_sequences=4", "train.sample_tokens=0",
            "train.measure_ceiling=false", "train.warmup_steps=0", "model.H=128", "moe.F=64",
            "train.learning_rate=0.003", "train.min_learning_rate=0.003"]  # the rate must not depend on train.steps  # fmt: skip
MANY_STEPS = 1000000000


class KillError(Exception):
    """One line for the user."""


def make_text(path):
    words = "waybill token expert rank route the a of to and dispatch combine".split()
    source = random.Random(5)
    path.write_text(" ".join(source.choice(words) for _ in range(8000)), encoding="utf-8")


def command(options, run, steps, resume):
    start = ["--resume", run] if resume else [ROOT / "configs/golden.toml", "--text", run.parent / "text.txt", "--run-dir", run]
    changes = [part for setting in SETTINGS + options.set + [f"train.steps={steps}"] for part in ("--set", setting)]
    return [str(part) for part in [options.binary, "train", *start, "--quiet", *changes]]


def latest_step(run):
    """Of the newest complete checkpoint; 0 where there is none yet."""
    path = run / "checkpoints/latest"
    return int(path.read_text(encoding="utf-8").strip().removeprefix("step_")) if path.is_file() else 0


def leftovers(run):
    """What a save that did not end leaves: a temporary folder or file, a step that `latest` does not name yet, or one too many."""
    names = [path.name for path in (run / "checkpoints").iterdir()]
    steps = sorted(int(name.removeprefix("step_")) for name in names if name.startswith("step_"))
    return any(name.startswith(".tmp") or name.endswith(".tmp") for name in names) or steps[-1:] != [latest_step(run)] or len(steps) > 2


def wait_for(condition, child, seconds):
    end = time.monotonic() + seconds
    while not condition():
        if child.poll() is not None:
            raise KillError(f"the run ended by itself with code {child.returncode}: {child.stderr.read().decode()}")
        if time.monotonic() > end:
            raise KillError(f"no new checkpoint within {seconds} s")


def is_saving(run):
    return any(path.name.startswith(".tmp_step_") for path in (run / "checkpoints").iterdir())


def kill_once(options, run, source, aimed):
    """Starts or continues the run and kills it; the time between two checkpoints in seconds."""
    before = latest_step(run)
    # On disk is what counts: stdout goes nowhere, stderr is read when the run ends by itself.
    with subprocess.Popen(command(options, run, MANY_STEPS, before > 0), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        try:
            wait_for(lambda: latest_step(run) > before, child, 120)
            start = time.monotonic()
            wait_for(lambda: latest_step(run) > before + 1, child, 120)
            period = time.monotonic() - start
            if aimed:
                wait_for(lambda: is_saving(run), child, 120)
            time.sleep(source.random() * period * (0.7 if aimed else 2))
        finally:
            child.kill()
            child.wait()


def verify(options, run):
    result = subprocess.run([options.binary, "inspect", "checkpoint", str(run), "--json"], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise KillError(f"the newest checkpoint does not load: {result.stderr.strip()}")
    return json.loads(result.stdout)


def tensor_sums(run):
    index = json.loads((run / "checkpoints" / (run / "checkpoints/latest").read_text(encoding="utf-8").strip() / "index.json").read_text(encoding="utf-8"))
    return {tensor["name"]: tensor["crc"] for tensor in index["body"]["tensors"]}


def run_once(options, run, steps, resume):
    result = subprocess.run(command(options, run, steps, resume), capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise KillError(f"a run that nobody killed failed: {result.stderr.strip()}")


def kill_test(options, folder):
    run, reference = folder / "killed", folder / "undisturbed"
    make_text(folder / "text.txt")
    source = random.Random(options.seed)
    inside, last = {False: 0, True: 0}, 0
    for trial in range(options.kills):
        aimed = trial % 2 == 1
        kill_once(options, run, source, aimed)
        inside[aimed] += leftovers(run)
        step = latest_step(run)
        if step <= last:
            raise KillError(f"kill {trial + 1}: the newest checkpoint went from step {last} to {step}")
        verified = verify(options, run)
        if verified["step"] != step:
            raise KillError(f"kill {trial + 1}: `latest` names step {step}, the checkpoint is of step {verified['step']}")
        last = step
        if (trial + 1) % 10 == 0:
            print(f"{trial + 1} kills, {sum(inside.values())} inside a save, newest good step {step}", flush=True)
    run_once(options, run, last + 1, resume=True)
    run_once(options, reference, last + 1, resume=False)
    if tensor_sums(run) != tensor_sums(reference):
        raise KillError(f"after {last + 1} steps the weights differ from those of a run that was never killed")
    settings = ", ".join([f"seed {options.seed}", *options.set])
    print(f"kill test: {options.kills} kills ({settings}), {sum(inside.values())} inside a save ({inside[True]} of {options.kills // 2} aimed, "
          f"{inside[False]} of {options.kills - options.kills // 2} at any time): the last good checkpoint loaded every time; step {last + 1} is bit-equal "
          "to a run that was never killed")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description="Kills training runs while they write checkpoints.")
    parser.add_argument("--binary", required=True, help="the waybill command")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the instants")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the config, for every run of the test")
    parser.add_argument("--folder", help="where to run (default: a temporary folder, removed afterwards)")
    options = parser.parse_args()
    folder = pathlib.Path(options.folder) if options.folder else pathlib.Path(tempfile.mkdtemp(prefix="waybill_kill_"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        kill_test(options, folder)
        return 0
    except KillError as error:
        print(f"kill test: {error} (seed {options.seed})", file=sys.stderr)
        return 1
    finally:
        if not options.folder:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
