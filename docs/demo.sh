#!/usr/bin/env bash
# The tour: ask for a plan, check one, cure a mistake, estimate it, then train a small model on this CPU.
set -euo pipefail
cd "$(dirname "$0")/.."

recipe=recipes/deepseek-v3-128k-256xh100-fp8.toml
small=recipes/demo-qwen3-moe-256-1xcpu-fp32.toml
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

step() { printf '\n\033[1m$ %s\033[0m\n' "$*"; }

step "threefold plan --model deepseek-v3 --chip h100 --gpus 1024 --seq-len 4096     # the answer, shortened"
threefold plan --model deepseek-v3 --chip h100 --gpus 1024 --seq-len 4096 --out "$work/plan.toml" >"$work/plan.txt"
sed -n '1,/^Profile/p' "$work/plan.txt" | sed '$d'

step "threefold check $recipe layout.ep=48 knobs.ep_overlap=true     # two mistakes"
threefold check "$recipe" layout.ep=48 knobs.ep_overlap=true || echo "(exit code $?: errors)"

step "threefold check $recipe layout.ep=48 --fix fixed.toml     # and the cure"
threefold check "$recipe" layout.ep=48 --fix "$work/fixed.toml"

step "threefold show $recipe --rank 40     # the folded grids, the groups of one rank, the pipeline"
threefold show "$recipe" --rank 40 | sed -n '/^attention/,$p'

step "threefold estimate $recipe     # memory and time by term, shortened"
threefold estimate "$recipe" | head -n 40

step "threefold train $small --stop-at 150     # a small Qwen3-style MoE on this machine's own Python sources, in two halves"
threefold train "$small" --run "$work/run" --stop-at 150 2>&1 | awk 'NR % 20 == 1 || !/^step/'
step "threefold train $small     # again: it goes on where it was stopped"
threefold train "$small" --run "$work/run" 2>&1 | awk 'NR % 20 == 1 || !/^step/'

python - "$work/run/metrics.jsonl" <<'PY'
import json, sys
from threefold.engine.data.embedded_corpus import embedded_corpus, unigram_entropy
losses = [json.loads(line)["loss"] for line in open(sys.argv[1]) if '"loss"' in line]
first, last = losses[0], sum(losses[-10:]) / 10
print(f"\nloss {first:.2f} -> {last:.2f} nats a byte; guessing by frequency alone would give {unigram_entropy(embedded_corpus()):.2f}")
PY

step "threefold sample RUN --prompt 'def '"
threefold sample "$work/run" --prompt "def " --tokens 160 --temperature 0.7

printf '\nNext: threefold rules, threefold models, threefold sweep, and the plans in recipes/.\n'
