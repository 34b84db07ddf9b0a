#!/usr/bin/env bash
# How long the main job takes from a clean clone, with packages cached: `make report` (bootstrap and environments
# included), a second run that finds nothing to do, and `make test` if asked for.
#
#   benchmarks/main_job.sh [RUNS] [test]
#
# Prints seconds of wall time, one line a run. The clone is of the last commit.
set -euo pipefail
runs=${1:-3}
repository=$(cd "$(dirname "$0")/.." && pwd)

seconds() { # seconds COMMAND…: wall time of a command whose output goes to a log
    local start end
    start=$(date +%s.%N)
    "$@" >>"$folder/log" 2>&1 || { tail -n 30 "$folder/log" >&2; exit 1; }
    end=$(date +%s.%N)
    awk -v a="$start" -v b="$end" 'BEGIN { printf "%.1f", b - a }'
}

for run in $(seq "$runs"); do
    folder=$(mktemp -d)
    git clone --quiet "$repository" "$folder/clone"
    cd "$folder/clone"
    printf 'run %s: make report %s s' "$run" "$(seconds make report)"
    printf ', again %s s' "$(seconds .venv/bin/snakemake --cores 8 report)"
    if [ "${2:-}" = test ]; then printf ', make test %s s' "$(seconds make test)"; fi
    printf '\n'
    cd /
    rm -rf "$folder"
done
