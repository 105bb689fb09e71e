#!/usr/bin/env bash
# The tour (`make demo`): plan, check, rehearse, train, profile, retune, validate, sample and report, on this CPU.
# Everything it makes stays in build/demo, or in the folder that is given.
set -euo pipefail
cd "$(dirname "$0")/.."

work=${1:-build/demo}
rm -rf "$work"
mkdir -p "$work"
large=recipes/deepseek-v3-128k-256xh100-fp8.toml
small=$work/small.toml

bold='' plain=''
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then bold=$'\033[1m' plain=$'\033[0m'; fi
tell() { printf '\n%s\n' "$*"; }
step() { printf '%s$ %s%s\n' "$bold" "$*" "$plain"; }
part() { printf '\n%s== %s (%s s) ==%s\n' "$bold" "$*" "$SECONDS" "$plain"; }
# Every 20th line of steps, and all others but those of torch's profiler.
some_steps() { grep --line-buffered -v -e '^USDT:' -e 'CPUAllocator' | awk '!/^step/ || ++n % 20 == 1'; }

part "1. A large model on a cluster, planned in seconds, without torch and without a GPU"
step "threefold plan --model deepseek-v3 --chip h100 --gpus 1024 --seq-len 4K     # shortened"
threefold plan --model deepseek-v3 --chip h100 --gpus 1024 --seq-len 4K --out "$work/large.toml" >"$work/large.txt"
sed -n '1,/^Profile/p' "$work/large.txt" | sed '$d'
tell "A published 128K recipe with a mistake in it: every violation at once, each with a fix that was tried."
step "threefold check $large layout.ep=48"
threefold check "$large" layout.ep=48 || echo "(exit code $?: errors)"
step "threefold check $large layout.ep=48 --fix fixed.toml"
threefold check "$large" layout.ep=48 --fix "$work/fixed.toml"

part "2. A small MoE for four processes of this machine: TP 2 x DP 2 for attention, folded over EP 4 for the experts"
tell "It recomputes every layer for a start, as one would who is not sure of the memory."
step "threefold plan --model demo-qwen3-moe --chip cpu --gpus 4 --seq-len 256 ... --out small.toml"
threefold plan --model demo-qwen3-moe --chip cpu --gpus 4 --seq-len 256 --global-batch 8 --micro-batch 4 \
    --precision fp32 layout.tp=2 layout.ep=4 knobs.recompute=full knobs.tp_overlap=false job.steps=60 job.lr=3e-3 \
    job.warmup_steps=15 job.aux_loss=0.05 run.save_every=30 run.tensorboard=false --out "$small" >"$work/small.txt"
grep -E '^ *(attention|experts)  ' "$work/small.txt"
step "threefold check small.toml"
threefold check "$small"
step "threefold dry-run small.toml     # the real engine on fake tensors: memory by term, every collective; shortened"
threefold dry-run "$small" | sed -n '1,/^largest/p' | sed '$d'

part "3. Train it on this machine's own Python sources, in two halves, and trace three steps"
step "threefold train small.toml --run run --profile --stop-at 30"
threefold train "$small" --run "$work/run" --profile --stop-at 30 2>&1 | some_steps
step "threefold train small.toml --run run     # the same command goes on where it was stopped"
threefold train "$small" --run "$work/run" 2>&1 | some_steps

part "4. Profile: which wall holds it back?"
step "threefold profile run     # shortened"
threefold profile "$work/run" | sed -n '1,/^communication of/p' | sed '$d'

part "5. Retune one knob: is full recompute worth its time here? Trials take turns with the plan"
step "threefold tune small.toml job.global_batch=4 job.micro_batch=2 --try 'knobs.recompute=[]' --trials 1 --budget 110s"
threefold tune "$small" job.global_batch=4 job.micro_batch=2 --try 'knobs.recompute=[]' --trials 1 --budget 110s \
    --out "$work/tuning" | sed '/refused/d'

part "6. Validate: does the folded layout compute what one rank computes? In fp64, gradient by gradient"
step "threefold verify small.toml"
threefold verify "$small" 2>/dev/null

part "7. What it learned"
step "threefold eval run --data docs/architecture.md"
threefold eval "$work/run" --data docs/architecture.md --sequences 8 2>/dev/null
step "threefold sample run --prompt 'def '"
threefold sample "$work/run" --prompt "def " --max-tokens 120 --temperature 0.7

part "8. Everything on one page for a browser"
step "threefold report run --out report.html"
threefold report "$work/run" --out "$work/report.html"

part "Done"
printf 'Open %s/report.html. Next: threefold explore, the plans in recipes/, and docs/guide/first-plan.md.\n' "$work"
