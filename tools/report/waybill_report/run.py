# SPDX-License-Identifier: Apache-2.0
"""Reads a run folder: metrics.jsonl (one JSON object a line, key "kind"), config.toml and the sample."""

import dataclasses
import json
import pathlib


class RunError(Exception):
    """The folder is not a run that can be shown; the text is one line for the user."""


@dataclasses.dataclass
class Run:
    folder: pathlib.Path
    header: dict
    steps: list[dict]
    evals: list[dict]
    sample: str
    config: str
    end: dict | None
    num_resumes: int


STEP_NUMBERS = ("step", "loss")


def parse_line(path, number, text):
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise RunError(f"{path}:{number}: not JSON ({error.msg})") from None
    if not isinstance(record, dict) or "kind" not in record:
        raise RunError(f'{path}:{number}: not a record with a "kind"')
    return record


def read_records(path):
    """Records of the file. A torn last line (the run was killed while writing) is left out."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    complete, tail = lines[:-1], lines[-1]
    records = [parse_line(path, number, text) for number, text in enumerate(complete, 1) if text.strip()]
    if tail.strip():
        try:
            records.append(parse_line(path, len(lines), tail))
        except RunError:
            pass
    return records


def drop_repeated(records):
    """Keeps the last record of each step: a run resumed from a checkpoint writes the steps after it again."""
    by_step = {}
    for record in records:
        if all(isinstance(record.get(key), (int, float)) for key in STEP_NUMBERS):
            by_step[record["step"]] = record
    return [by_step[step] for step in sorted(by_step)]


def read_text(path):
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def load_run(folder):
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise RunError(f"no such run folder: {folder}")
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise RunError(f"{folder} is not a run folder: metrics.jsonl is missing")
    records = read_records(path)
    headers = [record for record in records if record["kind"] == "header"]
    steps = drop_repeated(record for record in records if record["kind"] == "step")
    if not steps:
        raise RunError(f"{path} has no step yet")
    samples = [record.get("text", "") for record in records if record["kind"] == "sample"]
    ends = [record for record in records if record["kind"] == "end"]
    return Run(
        folder=folder,
        header=headers[-1] if headers else {},
        steps=steps,
        evals=drop_repeated(record for record in records if record["kind"] == "eval"),
        sample=samples[-1] if samples else read_text(folder / "sample.txt"),
        config=read_text(folder / "config.toml"),
        end=ends[-1] if ends else None,
        num_resumes=max(len(headers) - 1, 0),
    )
