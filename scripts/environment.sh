# shellcheck shell=bash
# Sourced by test.sh and quickstart.sh: find a Python, make a virtual environment, fill it once.

die() {
    echo "error: $1" >&2
    [ $# -lt 2 ] || echo "hint: $2" >&2
    exit 2
}

# The first Python that is new enough and can make virtual environments, on stdout.
find_python() {
    local candidate old="" bare=""
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
        # Running it is the only sure test: version managers leave names on the path that fail.
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
            ! command -v "$candidate" >/dev/null || old="$candidate"
            continue
        }
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$candidate"
            return
        fi
        bare="$candidate"
    done
    if [ -n "$bare" ]; then
        die "$bare cannot make virtual environments" "on Debian and Ubuntu: apt install python3-venv"
    elif [ -n "$old" ]; then
        die "no Python 3.11 or newer was found ($old is too old or does not start)" \
            "install one, or name it: PYTHON=/path/to/python3.12 bash $0"
    fi
    die "no Python was found" "install Python 3.11 or newer"
}

# MLX's back-end on this machine: cuda or cpu on Linux, metal on a Mac. TURBOQUANT_BACKEND wins.
find_backend() {
    case "${TURBOQUANT_BACKEND:-}" in
        cpu | cuda | metal) echo "$TURBOQUANT_BACKEND" && return ;;
        "") ;;
        *) die "TURBOQUANT_BACKEND is $TURBOQUANT_BACKEND" "cpu, cuda and metal are known" ;;
    esac
    if [ "$(uname -s)" = Darwin ]; then
        [ "$(uname -m)" = arm64 ] || die "MLX needs a Mac with Apple silicon, this one is $(uname -m)"
        echo metal
    elif command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
        echo cuda
    else
        echo cpu
    fi
}

# Of what pip has to say, what takes long: files of a megabyte or more, and the end.
show_pip_steps() {
    awk '/^ *(Downloading|Using cached) .*[0-9] [MG]B\)/ {
             file = $(NF - 2); sub(/.*\//, "", file); sub(/-.*/, "", file)
             print ($1 == "Using" ? "   from the cache: " : "   downloading ") file " " \
                 $(NF - 1) " " $NF
             fflush()
         }
         /^Installing collected packages/ { print "   unpacking"; fflush() }'
}

# make_environment FOLDER EXTRAS [PACKAGE ...]
# Installs this project (editable, with EXTRAS such as "cpu,dev") and the packages into FOLDER.
# Does nothing when the same was installed for the same pyproject.toml before.
make_environment() {
    local folder="$1" extras="$2" python wanted
    shift 2
    wanted="$root $extras $* $(cksum <"$root/pyproject.toml")"
    if [ -x "$folder/bin/python" ] && "$folder/bin/python" -c '' 2>/dev/null &&
        [ "$(cat "$folder/installed" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    python="$(find_python)" || exit 2
    echo "== making the virtual environment $folder" >&2
    "$python" -m venv --clear "$folder" || die "no virtual environment could be made in $folder"
    echo "== installing the package and what it needs (a few minutes the first time)" >&2
    # Older ones look through every file of every release, for a minute. Without it: slower.
    "$folder/bin/python" -m pip install --quiet --upgrade pip 2>"$folder/install.log" || true
    # Only what is imported is worth compiling, and Python does that then.
    "$folder/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-compile \
        --editable "$root${extras:+[$extras]}" "$@" 2>&1 |
        tee "$folder/install.log" | show_pip_steps >&2 || {
        grep -v '^WARNING' "$folder/install.log" | tail -n 15 >&2 || true
        die "pip could not install the package" "the reason stands above; run this again to go on"
    }
    # Written last: an installation that was cut short is started again.
    echo "$wanted" >"$folder/installed"
}
