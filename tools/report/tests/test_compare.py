# SPDX-License-Identifier: Apache-2.0
"""Tests of the loss curves of several runs side by side."""

import contextlib
import io
import json
import pathlib
import tempfile
import unittest
import xml.etree.ElementTree

from waybill_report import compare
from waybill_report.run import RunError


class CompareTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def make_run(self, name, recipe, offset, steps=60, bad=()):
        folder = self.folder / name
        folder.mkdir()
        records = [{"kind": "header", "schema": 1, "bigram_entropy": 2.5, "seed": 7, "layers": [{"layer": 1, "E": 4, "K": 1, "P": 2, "recipe": recipe}]}]
        for i in range(1, steps + 1):
            records.append({"kind": "step", "step": i, "loss": None if i in bad else 4.0 - i / 100 + offset, "valid": i not in bad})
        records += [{"kind": "eval", "step": steps, "loss": 3.3 + offset}, {"kind": "end", "step": steps, "loss": 3.25 + offset}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        (folder / "config.toml").write_text("", encoding="utf-8")
        return str(folder)

    def run_main(self, *arguments):
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = compare.main([*arguments])
        return code, output.getvalue(), errors.getvalue()

    def test_curves_are_means_of_ten_steps_and_survive_the_data_file(self):
        runs = [self.make_run("a", "fp32", 0.0), self.make_run("b", "nvfp4", 0.25, bad=(3,))]
        data, svg, page = (str(self.folder / name) for name in ("d.json", "d.svg", "d.html"))
        code, out, errors = self.run_main(*runs, "--data", data, "--svg", svg, "--output", page)
        self.assertEqual((code, errors), (0, ""))
        curves = compare.read_data(data)
        self.assertEqual([curve["name"] for curve in curves], ["fp32", "nvfp4"])
        self.assertEqual(curves[0]["train"][0], [10, 3.945])
        self.assertEqual(curves[0]["train"][-1], [60, 3.445])
        self.assertAlmostEqual(curves[1]["train"][0][1], sum(4.25 - i / 100 for i in range(1, 11) if i != 3) / 9, places=5)
        self.assertEqual(curves[1]["skipped"], 1)
        self.assertIn("| nvfp4 | 60 | 3.8950 | 3.5000 | +0.2500 | 1 |", out)
        self.assertIn("| fp32 | 60 | 3.6450 | 3.2500 | - | 0 |", out)
        self.assertEqual(compare.load_curves([data]), curves)
        again = str(self.folder / "again.svg")
        self.assertEqual(self.run_main(data, "--svg", again)[0], 0)
        self.assertEqual(pathlib.Path(again).read_text(encoding="utf-8"), pathlib.Path(svg).read_text(encoding="utf-8"))

    def test_the_picture_holds_a_line_a_run_inside_its_frame(self):
        curves = compare.load_curves([self.make_run("a", "fp32", 0.0), self.make_run("b", "fp8", 0.1)])
        tree = xml.etree.ElementTree.fromstring(compare.svg(curves))
        lines = [element for element in tree if element.tag.endswith("polyline")]
        self.assertEqual(len(lines), 2)
        for line in lines:
            for point in line.get("points").split():
                x, y = map(float, point.split(","))
                self.assertTrue(compare.LEFT <= x <= compare.WIDTH - compare.RIGHT and compare.TOP - 1 <= y <= compare.HEIGHT - compare.BOTTOM + 1, point)
        figures = compare.plotly_figures(curves)
        self.assertAlmostEqual(figures[1].data[0].y[0], 0.1, places=5)

    def test_two_runs_of_one_name_and_foreign_files_are_refused(self):
        runs = [self.make_run("a", "fp8", 0.0), self.make_run("b", "fp8", 0.1)]
        with self.assertRaisesRegex(RunError, "two runs have one name"):
            compare.load_curves(runs)
        self.assertEqual([curve["name"] for curve in compare.load_curves([f"x={runs[0]}", f"y={runs[1]}"])], ["x", "y"])
        foreign = self.folder / "f.json"
        foreign.write_text('{"records": []}', encoding="utf-8")
        code, _, errors = self.run_main(str(foreign))
        self.assertEqual(code, 2)
        self.assertIn("not a data file of this command", errors)


if __name__ == "__main__":
    unittest.main()
