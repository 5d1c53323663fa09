# Steps of a long run, for the scripts of this directory: a line for each with its time and result, its output in .ci/logs.

logs=.ci/logs
rm -rf "$logs" && mkdir -p "$logs"
beside=

# pytest lists each failure in one line of this width; where it thinks that it is in CI, in any number of them.
export COLUMNS=240
unset CI BUILD_NUMBER

# run NAME COMMAND...: prints its time and its result, and keeps its exit status in last_status.
run() {
    local name=$1 began=$SECONDS log="$logs/${1//[^a-z]/-}.log" status=0
    shift
    printf '=== %s ... ' "$name"
    # In a shell of its own that no condition waits for: within one, `set -e` would be off.
    set +e
    (set -e && "$@") </dev/null >"$log" 2>&1
    status=$?
    set -e
    if ((status == 0)); then
        printf 'passed in %s s\n' "$((SECONDS - began))"
    else
        printf 'FAILED in %s s, exit status %s; the end of %s:\n' "$((SECONDS - began))" "$status" "$log"
        tail -n 60 "$log"
    fi
    last_status=$status
}

require() {
    ((last_status == 0)) || exit "$last_status"
}

step() {
    run "$@"
    require
}

# begin NAME COMMAND...: a step that runs beside the next ones; `joined` waits for it, prints its line, and sets last_status.
begin() {
    set -m # a process group of its own, to be ended with all that it has started
    (run "$@" >"$logs/beside" && exit "$last_status") &
    beside=$!
    set +m
}

joined() {
    last_status=0
    wait "$beside" || last_status=$?
    beside=
    cat "$logs/beside"
}

# Some thousand tests, with kills and time limits among them, several at a time, on a machine whose other load is unknown:
# what fails is repeated once, alone and one at a time. Both results are printed, and what fails twice has failed.
# tests NAME TARGET...
tests() {
    local name=$1
    shift
    run "$name" make --no-print-directory "$@" ARGS='--durations=20'
    ((last_status != 0)) || return 0
    run "$name, what failed" make --no-print-directory "$@" WORKERS=0 FLEET_WORKERS=0 \
        ARGS='--last-failed --last-failed-no-failures=none'
}

# report NAME COMMAND...: prints what it said, and fails nothing.
report() {
    run "$@"
    ((last_status != 0)) || cat "$logs/${1//[^a-z]/-}.log"
}
