#!/usr/bin/env bash
# The tour: a plan, what the rules say about it, a mistake and its cure, and the folded grids.
set -euo pipefail
cd "$(dirname "$0")/.."

recipe=recipes/deepseek-v3-128k-256xh100-fp8.toml
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

step() { printf '\n\033[1m$ %s\033[0m\n' "$*"; }

step "cat $recipe"
cat "$recipe"

step "threefold check $recipe"
threefold check "$recipe"

step "threefold check $recipe layout.ep=48 knobs.ep_overlap=true     # two mistakes"
threefold check "$recipe" layout.ep=48 knobs.ep_overlap=true || echo "(exit code $?: errors)"

step "threefold check --explain ep-overlap-excludes-moe-recompute"
threefold check --explain ep-overlap-excludes-moe-recompute

step "threefold check $recipe layout.ep=48 knobs.ep_overlap=true --fix fixed.toml"
threefold check "$recipe" layout.ep=48 knobs.ep_overlap=true --fix "$work/fixed.toml"

step "threefold show $recipe --rank 40     # the folded grids, the groups of one rank, the pipeline"
threefold show "$recipe" --rank 40 | sed -n '/^what/,$p'

printf '\nNext: threefold rules, threefold models, threefold chips, and the plans in recipes/.\n'
