#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh clone to a trained model and its report: installs, builds the command, trains configs/demo.toml on 4 ranks, on a GPU where there is one
# and nvcc to build for it.
#   scripts/demo.sh [--text FILE|FOLDER] [--out RUN_FOLDER] [--set key=value]...
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
start_folder=$PWD

usage() { sed -n '3,5s/^# *//p' "${BASH_SOURCE[0]}"; }
die() { printf 'demo: %s\n' "$*" >&2; exit 2; }
absolute() { case $1 in /*) printf '%s' "$1" ;; *) printf '%s/%s' "$start_folder" "$1" ;; esac; }

text='' out='' overrides=()
while [ $# -gt 0 ]; do
  case $1 in
    --text) [ $# -gt 1 ] || die "--text needs a file or folder"; text=$(absolute "$2"); shift 2 ;;
    --out) [ $# -gt 1 ] || die "--out needs a folder"; out=$(absolute "$2"); shift 2 ;;
    --set) [ $# -gt 1 ] || die "--set needs key=value"; overrides+=(--set "$2"); shift 2 ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; die "unknown option '$1'" ;;
  esac
done
[ -z "$text" ] || [ -e "$text" ] || die "no such file or folder: $text"

seconds_at_start=$SECONDS
cd "$root"
bash scripts/setup.sh demo

cuda=OFF
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  if command -v nvcc >/dev/null || [ -n "${CUDACXX:-}" ]; then cuda=ON; else printf 'a GPU is there but no nvcc on PATH: building for the CPU\n' >&2; fi
fi
printf 'building the waybill command (build/release, CUDA %s)\n' "$cuda"
build_log=$(mktemp)
trap 'rm -f "$build_log"' EXIT
if ! cmake --preset release -DWAYBILL_CUDA=$cuda >"$build_log" 2>&1; then
  cat "$build_log" >&2
  die "configuration failed"
fi
cmake --build build/release --target waybill
printf 'install and build took %d s\n' $((SECONDS - seconds_at_start))

run=${out:-$root/runs/demo-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$(dirname "$run")"
if [ -z "$text" ]; then
  # `bible` is installed to /usr/bin by bible-kjv; the whole book is 4.4 MB.
  mkdir -p "$root/build/text"
  text=$root/build/text/king_james.txt
  if [ ! -s "$text" ]; then
    COLUMNS=80 PATH="$PATH:/usr/games" bible gen1:1-rev22:21 >"$text.part" || die "bible-kjv printed no text; give one with --text"
    mv "$text.part" "$text"
  fi
  printf 'text: King James Bible from the package bible-kjv (%d bytes)\n' "$(wc -c <"$text")"
fi

build/release/tools/waybill/waybill train configs/demo.toml --text "$text" --run-dir "$run" "${overrides[@]}"

if [ -x .venv/bin/python ] && .venv/bin/python -c 'import plotly' 2>/dev/null; then
  bash scripts/report.sh "$run"
else
  printf 'no HTML report: plotly is not installed in .venv (run scripts/setup.sh demo with a network, then scripts/report.sh %s)\n' "$run" >&2
fi
printf '\neverything is in %s\n' "$run"
for file in config.toml metrics.jsonl sample.txt checkpoints report.html; do
  [ -e "$run/$file" ] && printf '  %-14s %s\n' "$file" "$(case $file in
    config.toml) echo 'the run, every value resolved' ;; metrics.jsonl) echo 'one line a step' ;; sample.txt) echo 'generated text' ;;
    checkpoints) echo 'resume with: waybill train --resume' ;; report.html) echo 'plots; open it in a browser' ;; esac)"
done
printf 'whole demo: %d s\n' $((SECONDS - seconds_at_start))
