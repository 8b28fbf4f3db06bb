#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains configs/demo.toml once in every recipe, one after another, and draws the losses side by side: docs/figures/recipes.json and .svg.
#   scripts/recipe_curves.sh --text FILE [--ablation] [--out FOLDER] [--waybill COMMAND] [--set key=value]...
# --ablation: nvfp4 with and without stochastic rounding and the Hadamard rotation, beside fp32; docs/figures/nvfp4.json and .svg.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
die() { printf 'recipe_curves: %s\n' "$*" >&2; exit 2; }

text='' out='' figure=recipes waybill=$root/build/release/tools/waybill/waybill overrides=()
while [ $# -gt 0 ]; do
  case $1 in
    --text) [ $# -gt 1 ] || die "--text needs a file"; text=$2; shift 2 ;;
    --ablation) figure=nvfp4; shift ;;
    --out) [ $# -gt 1 ] || die "--out needs a folder"; out=$2; shift 2 ;;
    --waybill) [ $# -gt 1 ] || die "--waybill needs a command"; waybill=$2; shift 2 ;;
    --set) [ $# -gt 1 ] || die "--set needs key=value"; overrides+=(--set "$2"); shift 2 ;;
    *) die "unknown option '$1'" ;;
  esac
done
[ -n "$text" ] || die "give a text with --text"
[ -x "$waybill" ] || die "no such command: $waybill (build it: cmake --preset release && cmake --build build/release --target waybill)"

out=${out:-$root/runs/$figure}

variants=(fp32 bf16 fp8 mxfp8 nvfp4)
[ $figure = recipes ] || variants=(fp32 nvfp4 nvfp4:stochastic_rounding nvfp4:hadamard nvfp4:stochastic_rounding,hadamard)
runs=()
for variant in "${variants[@]}"; do
  recipe=${variant%%:*} off=()
  name=$recipe
  if [ "$variant" != "$recipe" ]; then  # what is switched off
    name="$recipe without ${variant#*:}"
    name=${name//,/ and }
    for key in $(tr , ' ' <<<"${variant#*:}"); do off+=(--set "moe.$key=false"); done
  fi
  run=$out/${variant//[:,]/_no_}
  runs+=("$name=$run")
  if [ -e "$run/metrics.jsonl" ] && grep -q '"kind":"end"' "$run/metrics.jsonl"; then continue; fi  # an interrupted series goes on
  rm -rf "$run"
  "$waybill" train "$root/configs/demo.toml" --text "$text" --run-dir "$run" --set "moe.recipe=$recipe" "${off[@]}" "${overrides[@]}"
done
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
PYTHONPATH="$root/tools/report${PYTHONPATH:+:$PYTHONPATH}" "$python" -m waybill_report.compare "${runs[@]}" --data "$root/docs/figures/$figure.json" \
  --svg "$root/docs/figures/$figure.svg"
