# SPDX-License-Identifier: Apache-2.0
"""Tests of the report, with the standard library's unittest: python -m unittest discover -s tools/report/tests -t tools/report"""

import contextlib
import io
import json
import os
import pathlib
import re
import tempfile
import unittest

from waybill_report import __main__ as command
from waybill_report import plots
from waybill_report.run import RunError, load_run

HEADER = {"kind": "header", "schema": 1, "version": "0.1.0", "name": "tiny <run>", "created": "2026-01-01T00:00:00Z", "world": 2, "parameters": 1000,
          "active_parameters": 400, "unigram_entropy": 3.0, "bigram_entropy": 2.5, "layers": [{"layer": 1, "E": 4, "K": 1, "P": 2}]}  # fmt: skip


def step(number, counts=(4, 2, 1, 1), **more):
    record = {"kind": "step", "step": number, "loss": 5.0 / number, "tokens_per_s": 100.0, "phase_ms": {"router": 1.0, "expert_gemm": 3.0},
              "bytes": {"payload": 100, "ids": 4, "weights": 8, "counts": 2, "dense_route_map": 50, "dense_probability_row": 80},
              "layers": [{"layer": 1, "counts": list(counts), "rank_slots": [6, 2]}]}  # fmt: skip
    return record | more


class ReportTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def write(self, records, tail=""):
        text = "".join(json.dumps(record) + "\n" for record in records) + tail
        (self.folder / "metrics.jsonl").write_text(text, encoding="utf-8")

    def run_command(self, *arguments):
        errors, output = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
            code = command.main([*arguments])
        return code, output.getvalue(), errors.getvalue()

    def test_page_is_self_contained_and_escapes_text(self):
        self.write([HEADER, step(1), step(2), {"kind": "eval", "step": 2, "loss": 2.4}, {"kind": "sample", "step": 2, "text": "<b>And</b>"}])
        (self.folder / "config.toml").write_text("[model]\n", encoding="utf-8")
        code, _, errors = self.run_command(str(self.folder))
        self.assertEqual((code, errors), (0, ""))
        page = (self.folder / "report.html").read_text(encoding="utf-8")
        self.assertNotRegex(page, r"<script[^>]+src=|<link[^>]+href=")
        self.assertIn("&lt;b&gt;And&lt;/b&gt;", page)
        self.assertIn("tiny &lt;run&gt;", page)
        for section in plots.SECTIONS:
            self.assertRegex(page, rf'<div[^>]*id="{section.__name__}"')
        self.assertIn("2.4000", page)
        self.assertFalse([path for path in self.folder.iterdir() if path.name.startswith("report.html") and path.name != "report.html"])

    def test_numbers_of_the_figures(self):
        self.write([HEADER, step(1), step(2, counts=(8, 0, 0, 0))])
        run = load_run(self.folder)
        self.assertEqual(list(plots.layer_load(run).data[0].z[0]), [2.0, 4.0])
        heat = plots.expert_load(run).data[0].z
        self.assertEqual([list(row) for row in heat], [[2.0, 4.0], [1.0, 0.0], [0.5, 0.0], [0.5, 0.0]])
        self.assertEqual(list(plots.rank_imbalance(run).data[0].y), [1.5, 1.5])
        self.assertEqual(sum(bar.x[0] for bar in plots.sent_bytes(run).data), 114)
        self.assertEqual(sum(bar.x[1] for bar in plots.sent_bytes(run).data), 230)

    def test_long_runs_are_averaged_into_columns(self):
        self.write([HEADER] + [step(number) for number in range(1, 1001)])
        figure = plots.layer_load(load_run(self.folder))
        self.assertEqual(len(figure.data[0].x), plots.MAX_COLUMNS)

    def test_torn_last_line_is_left_out_and_a_resumed_step_counts_once(self):
        self.write([HEADER, step(1), step(2), HEADER, step(2, loss=9.0)], tail='{"kind": "step", "st')
        run = load_run(self.folder)
        self.assertEqual([record["loss"] for record in run.steps], [5.0, 9.0])
        self.assertEqual(run.num_resumes, 1)

    def test_fields_that_were_not_recorded_leave_their_figure_out(self):
        self.write([{"kind": "step", "step": 1, "loss": 1.0}])
        code, _, _ = self.run_command(str(self.folder))
        self.assertEqual(code, 0)
        self.assertIn("phases: not recorded", (self.folder / "report.html").read_text(encoding="utf-8"))

    def test_broken_run_folders_are_refused_in_one_line(self):
        cases = {"no such run folder": self.folder / "missing", "metrics.jsonl is missing": self.folder}
        for text, folder in cases.items():
            code, _, errors = self.run_command(str(folder))
            self.assertEqual(code, 2)
            self.assertIn(text, errors)
            self.assertEqual(len(errors.splitlines()), 1)
        self.write([HEADER], tail="")
        self.assertRegex(self.run_command(str(self.folder))[2], "has no step yet")
        self.write([], tail='{"kind": \n' + json.dumps(step(1)) + "\n")
        code, _, errors = self.run_command(str(self.folder))
        self.assertEqual(code, 2)
        self.assertTrue(re.search(r"metrics\.jsonl:1: not JSON", errors), errors)
        self.assertFalse((self.folder / "report.html").exists())
        with self.assertRaises(RunError):
            load_run(self.folder)

    def test_a_run_without_one_finite_loss_is_shown(self):
        lines = [json.dumps(HEADER), json.dumps(step(1) | {"loss": None, "valid": False}), json.dumps(step(2)).replace("2.5", "NaN"),
                 '{"kind": "eval", "step": 2, "loss": Infinity}']  # fmt: skip
        (self.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        code, _, errors = self.run_command(str(self.folder))
        self.assertEqual((code, errors), (0, ""))
        page = (self.folder / "report.html").read_text(encoding="utf-8")
        self.assertEqual(page.count("<b>not finite</b>"), 2)
        self.assertIn("<b>1</b><span>steps without an update", page)
        self.assertEqual(list(plots.loss(load_run(self.folder)).data[0].y), [None, None])

    def test_damaged_records_are_one_line_with_file_line_and_field(self):
        cases = {
            '{"kind": "step", "step": "7", "loss": 1}': 'step of a step record is "7", expected a whole number',
            '{"kind": "step", "step": 7}': "loss of a step record is missing",
            '{"kind": "step", "step": 7, "loss": 1, "phase_ms": [1]}': "phase_ms of a step record is [1], expected numbers by name",
            '{"kind": "step", "step": 7, "loss": 1, "layers": [{"layer": 1, "counts": ["a"]}]}': "expected layers with counts",
            '{"kind": "step", "step": 7, "loss": 1, "layers": {"layer": 1}}': "expected layers with counts",
            '{"kind": "eval", "step": 7, "loss": "low"}': 'loss of a eval record is "low"',
            '{"kind": "sample", "text": 5}': "text of a sample record is 5",
            '{"kind": "header", "schema": 99}': "schema 99 of the metrics, this report reads 1",
            '{"kind": 7}': 'not a record with a "kind"',
            "[" * 100000: "cannot be read",
            "[]": 'not a record with a "kind"',
        }
        for line, expected in cases.items():
            with self.subTest(line[:60]):
                self.write([HEADER, step(1)], tail=line + "\n")
                code, _, errors = self.run_command(str(self.folder))
                self.assertEqual(code, 2)
                self.assertEqual(len(errors.splitlines()), 1, errors)
                self.assertIn("metrics.jsonl:3: ", errors)
                self.assertIn(expected, errors)
        self.write([HEADER, step(1), step(2, counts=(1, 2))])
        code, _, errors = self.run_command(str(self.folder))
        self.assertEqual((code, len(errors.splitlines())), (2, 1))
        self.assertIn("step 2: layer 1 has 2 counts, earlier steps have 4", errors)

    def test_only_files_are_replaced(self):
        self.write([HEADER, step(1)])
        pipe, folder, target = self.folder / "pipe", self.folder / "folder", self.folder / "target.html"
        os.mkfifo(pipe)
        folder.mkdir()
        for output, expected in ((pipe, "not a regular file: it is not replaced"), (folder, "is a folder: it is not replaced"),
                                 (self.folder / "none" / "a.html", "none is not a folder"),
                                 (pathlib.Path("/dev/null"), "/dev/null is not a regular file")):  # fmt: skip
            code, _, errors = self.run_command(str(self.folder), "--output", str(output))
            self.assertEqual(code, 2)
            self.assertIn(expected, errors)
        self.assertTrue(pipe.is_fifo() and folder.is_dir() and pathlib.Path("/dev/null").is_char_device())
        target.write_text("old", encoding="utf-8")
        (self.folder / "link.html").symlink_to(target)
        self.assertEqual(self.run_command(str(self.folder), "--output", str(self.folder / "link.html"))[0], 0)
        self.assertTrue((self.folder / "link.html").is_symlink())
        self.assertIn("<!doctype html>", target.read_text(encoding="utf-8"))


if __name__ == "__main__":
    unittest.main()
