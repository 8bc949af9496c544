#!/usr/bin/env bash
# Everything that README and docs promise, as a stranger meets it: a fresh clone in an empty directory, an empty home
# and an empty environment. Each step ends with status 0, or with status 2 and one line that names what gets the data.
#
#     tests/fresh.sh --quick     the demo, the notebook, the package in an environment of its own; some minutes
#     tests/fresh.sh             also `make test`, every command, example, benchmark and study; an hour
#
# The log of each step is in out/fresh. KEEP=1 keeps the clone. pip's own settings (PIP_*) and proxies are passed on.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
quick=${1:-}
place=$(mktemp -d "${TMPDIR:-/tmp}/fedspan-fresh.XXXXXX")
logs=$root/out/fresh
mkdir -p "$logs" "$place/home" && rm -f "$logs"/*.log
[ -n "${KEEP:-}" ] || trap 'rm -rf "$place"' EXIT
git clone -q "$root" "$place/clone" || exit 1
cd "$place/clone" || exit 1
mapfile -t passed < <(env | grep -E '^(PIP_|https?_proxy=|HTTPS?_PROXY=|no_proxy=|NO_PROXY=|TORCH=|PYTHON=|SSL_CERT_FILE=)')
failed=0 number=0

# step NAME COMMAND…: run a command in the empty environment, and judge how it ends.
step() {
    local name=$1 began=$SECONDS status log
    shift
    number=$((number + 1))
    log=$logs/$(printf %02d $number)-$name.log
    env -i "${passed[@]}" HOME="$place/home" PATH="$PATH" LANG=C.UTF-8 OMP_NUM_THREADS=1 MPLBACKEND=agg "$@" \
        > "$log" 2>&1 < /dev/null
    status=$?
    if [ $status -eq 0 ]; then
        echo "ok      $name ($((SECONDS - began)) s)"
    elif [ $status -eq 2 ] && ! grep -q Traceback "$log" && tail -n 1 "$log" | grep -qE 'fedspan data get|pip install'; then
        echo "needs   $name: $(tail -n 1 "$log")"
    else
        echo "FAILED  $name (status $status): $* — see $log"
        tail -n 5 "$log" | sed 's/^/        /'
        failed=1
    fi
}

step make-demo make demo
bin=$PWD/.venv/bin
python=$bin/python fedspan=$bin/fedspan
cat > "$place/notebook.py" << 'PYTHON'
import json, sys
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]), globals())
PYTHON
step notebook "$python" "$place/notebook.py" examples/quickstart.ipynb

# The second way in: a wheel in an environment of its own, beside nothing of the repository.
step wheel "$bin/pip" wheel -q --no-deps -w "$place/dist" .
"$python" -m venv "$place/venv"
step wheel-torch .ci/install-torch "$place/venv/bin/pip" "$(sed -n 's/^TORCH_VERSION := //p' Makefile)"
step wheel-install bash -c "'$place'/venv/bin/pip install \"\$(echo '$place'/dist/*.whl)[plot,vision]\""
mkdir "$place/user"
sed -n '/^```python$/,/^```$/p' README.md | sed '/^```$/,$d; /^```python$/d' > "$place/user/quickstart.py"
step wheel-quickstart env -C "$place/user" "$place/venv/bin/python" quickstart.py
for kind in tabular custom; do
    step "wheel-init-$kind" env -C "$place/user" "$place/venv/bin/fedspan" init "my-$kind" --kind "$kind"
    step "wheel-run-$kind" env -C "$place/user/my-$kind" "$place/venv/bin/fedspan" run spec.toml --run-dir out/first
done

if [ "$quick" != --quick ]; then
    step make-test make -j2 test
    # Every command line of README and docs that begins with fedspan, with few rounds where it takes settings.
    while IFS= read -r line; do
        name=$(tr -cs 'a-z0-9' '-' <<< "$line" | cut -c1-48)
        case $line in
            *…* | *\<* | *'$'*) continue ;; # a pattern, not a command
            "fedspan run "*) line="$line --set rounds=3" ;;
            "fedspan reproduce "*) continue ;; # below, each at its smallest scale
        esac
        step "$name" env -C "$PWD" PATH="$bin:$PATH" bash -c "$line"
    done < <(sed -n 's/^    \(fedspan .*\)$/\1/p' README.md docs/comparing.md)
    step new-method "$python" examples/new_method.py
    step hospitals "$python" examples/hospitals.py --rounds 1 --seeds 1
    step finetune "$python" examples/finetune_minilm.py --rounds 1
    step demo-flower make demo-flower
    for file in benchmarks/*.py; do
        [ "$file" = benchmarks/simulation_peers.py ] || step "benchmark-$(basename "$file" .py)" "$python" "$file" --short
    done
    for spec in src/fedspan/study/specs/*.toml; do
        study=$(basename "$spec" .toml)
        step "reproduce-$study" "$fedspan" reproduce "$study" --scale smoke --out "out/$study"
    done
fi
[ $failed -eq 0 ] && echo "everything runs"
exit $failed
