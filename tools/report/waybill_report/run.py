# SPDX-License-Identifier: Apache-2.0
"""Reads a run folder: metrics.jsonl (one JSON object a line, key "kind"), config.toml and the sample."""

import dataclasses
import json
import math
import pathlib

SCHEMA = 1  # kMetricsSchema of include/waybill/metrics.h


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


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_count(value):
    return isinstance(value, int) and not isinstance(value, bool)


def is_optional_number(value):
    return value is None or is_number(value)


def is_numbers_by_name(value):
    return isinstance(value, dict) and all(is_number(item) for item in value.values())


def is_counts(value):
    return isinstance(value, list) and all(is_count(item) for item in value)


def is_layers(value):
    return isinstance(value, list) and all(
        isinstance(layer, dict) and is_count(layer.get("layer")) and is_counts(layer.get("counts", [])) and is_counts(layer.get("rank_slots", []))
        and is_count(layer.get("experts_per_bin", 1)) for layer in value)  # fmt: skip


# What the figures take for granted, by kind of record: field, check, what is expected, whether it must be there. A loss is null where it is
# not finite.
FIELDS = {
    "header": [("unigram_entropy", is_optional_number, "a number", False), ("bigram_entropy", is_optional_number, "a number", False),
               ("parameters", is_optional_number, "a number", False), ("active_parameters", is_optional_number, "a number", False)],
    "step": [("step", is_count, "a whole number", True), ("loss", is_optional_number, "a number or null", True),
             ("tokens_per_s", is_optional_number, "a number", False), ("tflops", is_optional_number, "a number", False),
             ("mfu", is_optional_number, "a number", False), ("ceiling_share", is_optional_number, "a number", False),
             ("phase_ms", is_numbers_by_name, "numbers by name", False), ("bytes", is_numbers_by_name, "numbers by name", False),
             ("layers", is_layers, "layers with counts", False)],
    "eval": [("step", is_count, "a whole number", True), ("loss", is_optional_number, "a number or null", True)],
    "sample": [("text", lambda value: isinstance(value, str), "a text", True)],
}  # fmt: skip


def without_nan(value):
    """NaN and Infinity, which Python reads though JSON has none, as null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return value


def check_record(where, record):
    if record["kind"] == "header" and record.get("schema", SCHEMA) != SCHEMA:
        raise RunError(f"{where}: schema {json.dumps(record['schema'])} of the metrics, this report reads {SCHEMA}")
    for field, good, expected, required in FIELDS.get(record["kind"], []):
        if (required or field in record) and not (field in record and good(record[field])):
            seen = json.dumps(record[field])[:60] if field in record else "missing"
            raise RunError(f"{where}: {field} of a {record['kind']} record is {seen}, expected {expected}")


def parse_line(path, number, text):
    try:
        record = without_nan(json.loads(text))
    except json.JSONDecodeError as error:
        raise RunError(f"{path}:{number}: not JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a list of thousands of lists
        raise RunError(f"{path}:{number}: cannot be read ({error})") from None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise RunError(f'{path}:{number}: not a record with a "kind"')
    check_record(f"{path}:{number}", record)
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
    by_step = {record["step"]: record for record in records}
    return [by_step[step] for step in sorted(by_step)]


def check_sizes(path, steps):
    """A layer has as many experts and ranks at the last step as at the first."""
    sizes = {}
    for step in steps:
        for layer in step.get("layers", []):
            for key in ("counts", "rank_slots"):
                size = len(layer.get(key, []))
                if size and sizes.setdefault((layer["layer"], key), size) != size:
                    known = sizes[layer["layer"], key]
                    raise RunError(f"{path}: step {step['step']}: layer {layer['layer']} has {size} {key}, earlier steps have {known}")


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
    check_sizes(path, steps)
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
