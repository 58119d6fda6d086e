#!/usr/bin/env bash
# Check everything: lint, format, types, tests.
#
#     bash scripts/test.sh [--all] [-- PYTEST ARGUMENTS]
#
# The tools and the package are installed into .venv-test (or $TURBOQUANT_TEST_VENV) the first
# time and whenever pyproject.toml has changed. --all also runs the tests marked heavy.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
source scripts/environment.sh

markers=(-m "not heavy")
while [ $# -gt 0 ]; do
    case "$1" in
        --all) markers=() ;;
        --) shift && break ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0" && exit 0 ;;
        *) die "unknown argument $1" "bash scripts/test.sh [--all] [-- PYTEST ARGUMENTS]" ;;
    esac
    shift
done

environment="${TURBOQUANT_TEST_VENV:-$root/.venv-test}"
backend="$(find_backend)"
extras="vlm,dev"
[ "$backend" = metal ] || extras="$backend,$extras"
make_environment "$environment" "$extras"
python="$environment/bin/python"

# Every step runs, whatever the ones before it found; the tests come last so that their closing
# line is what a reader sees.
failed=()
step() {
    echo "== $1" >&2
    "$python" -m "${@:2}" || failed+=("$1")
}
step "ruff check" ruff check --quiet .
step "ruff format" ruff format --check .
step "mypy" mypy --no-error-summary
# a file's tests share fixtures, so they stay together
step "pytest" pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder "${markers[@]+"${markers[@]}"}" "$@"

if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
