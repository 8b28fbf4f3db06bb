# SPDX-License-Identifier: Apache-2.0
"""Tests of the plots of bench moe and of a run's expert load."""

import contextlib
import io
import json
import pathlib
import tempfile
import unittest

from waybill_report import load, moe_bench, moe_module
from waybill_report.run import RunError, load_run


def record(variant, metric, value, **more):
    return {"op": "moe layer", "case": "tiny", "load": "router", "checked": True, "variant": variant, "metric": metric, "value": value, "p90": value} | more


class LoadPlotsTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def quiet(self, main, *arguments):
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            return main([*arguments]), errors.getvalue()

    def test_records_are_grouped_by_stack_and_ablation(self):
        path = self.folder / "records.json"
        records = [record("sparse: forward", "time", 2000, p90=2500), record("sparse: forward + backward", "bytes ids", 7),
                   record("ablation dense-map: forward", "time", 3000)]  # fmt: skip
        path.write_text(json.dumps({"records": records}), encoding="utf-8")
        stacks, case = moe_bench.load_records(path)
        self.assertEqual(case, "tiny, load router, checked")
        sparse, dense_map = {"forward": 2.0, "forward p90": 2.5, "bytes ids": 7}, {"forward": 3.0, "forward p90": 3.0}
        self.assertEqual(stacks, {(False, "sparse"): sparse, (True, "dense-map"): dense_map})
        figures, _ = moe_bench.figures_of(path)
        self.assertEqual(len(figures), 8)
        self.assertEqual(list(figures[0].data[0].y), [2.0])
        self.assertTrue(figures[4].layout.title.text.startswith("Ablation"))
        code, _ = self.quiet(moe_bench.main, str(path))
        self.assertEqual(code, 0)
        self.assertIn("all stacks: time", (self.folder / "records.html").read_text(encoding="utf-8").lower())

    def test_module_records_of_gpus_are_grouped_by_case_and_load(self):
        row = {"op": "moe fwd+bwd", "case": "tiny", "load": "W1", "variant": "sparse captured", "value": 2000.0, "spread": 100.0, "tflops": 400.0,
               "peak_bytes": 2**30, "shares": {"dispatch": 0.25, "expert_gemm": 0.75}, "unit": "us"}  # fmt: skip
        torch = row | {"variant": "torch grouped", "value": 8000.0, "tflops": 100.0, "shares": {"exchange": 0.5, "gemm": 0.5}}
        rate = {"op": "dense", "unit": "TFLOP/s"}
        control = {"op": "control: order of wgrad", "case": "tiny", "unit": "us"}  # a kernel by itself: no bar
        path = self.folder / "moe.json"
        for text in (json.dumps({"records": [rate, row, control, torch]}), "".join(json.dumps(r) + "\n" for r in (rate, row, control, torch))):
            path.write_text(text, encoding="utf-8")
            self.assertEqual([(key, len(rows)) for key, rows in moe_module.load_cases(path).items()], [(("tiny", "W1"), 2)])
            figures = moe_module.figures_of(path)
            self.assertEqual([list(trace.y) for trace in figures[0].data], [[400.0, 100.0]])
            self.assertEqual({trace.name: list(trace.y) for trace in figures[1].data},
                             {"dispatch": [0.5, 0], "expert_gemm": [1.5, 0], "exchange": [0, 4.0], "gemm": [0, 4.0]})  # fmt: skip
            self.assertEqual(self.quiet(moe_bench.main, str(path))[0], 0)
            self.assertTrue("memory without weights" in (self.folder / "moe.html").read_text(encoding="utf-8"))
        path.write_text(json.dumps({"records": [{"op": "moe fwd+bwd", "case": "tiny"}]}), encoding="utf-8")
        self.assertEqual(self.quiet(moe_bench.main, str(path))[0], 2)

    def test_a_file_without_records_is_refused_in_one_line(self):
        path = self.folder / "records.json"
        bad_value = json.dumps({"records": [record("a: forward", "time", "x")]})
        for text in ("{", '{"records": []}', "[1]", '{"records": 5}', '{"records": [{"op": "moe layer"}]}', bad_value):
            path.write_text(text, encoding="utf-8")
            code, errors = self.quiet(moe_bench.main, str(path))
            self.assertEqual(code, 2)
            self.assertEqual(errors.count("\n"), 1)
            self.assertIn("records.json", errors)

    def test_load_by_phase_follows_the_counts(self):
        layers = [[{"layer": 3, "counts": [8, 0] if i < 2 else [4, 4], "rank_slots": [6, 2]}] for i in range(4)]
        steps = [{"kind": "step", "step": i + 1, "loss": 1.0, "layers": layers[i]} for i in range(4)]
        (self.folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps), encoding="utf-8")
        run = load_run(self.folder)
        self.assertEqual([label for label, _ in load.phase_steps(run, 2)], ["steps 1-2", "steps 3-4"])
        figure = load.by_phase(run, 2, "counts", "title")
        self.assertEqual([list(trace.y) for trace in figure.data], [[2.0], [1.0]])
        self.assertEqual(list(load.by_phase(run, 4, "rank_slots", "title").data[0].y), [1.5])
        self.assertEqual(list(load.shares(run, 1, 3).data[0].y), [1.5, 0.5])
        code, _ = self.quiet(load.main, str(self.folder), "--phases", "2")
        self.assertEqual(code, 0)
        self.assertIn("Busiest rank", (self.folder / "load.html").read_text(encoding="utf-8"))

    def test_a_run_without_loads_is_refused(self):
        (self.folder / "metrics.jsonl").write_text('{"kind":"step","step":1,"loss":1.0}\n', encoding="utf-8")
        with self.assertRaises(RunError):
            load.figures_of(load_run(self.folder), 2)


if __name__ == "__main__":
    unittest.main()
