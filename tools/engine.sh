#!/usr/bin/env bash
# A Docker Engine for development and CI, where no init system runs one: `tools/engine.sh start|stop|status`.
#
# start   where an Engine answers already, uses that one; else starts one, with crun as a second runtime
#         where it is installed, and waits until it answers. It keeps its images from one start to the next.
# stop    ends the one that was started here, with its containers, and no other.
# status  says which there is; fails when none answers.
#
#   DOCKER_HOST          unix:///PATH to serve there instead of at the usual place
#   ENGINE_DIR           where it keeps images and log (default: /var/lib/remote-executor-engine)
#   ENGINE_NETWORK=none  no network, for one next to another Engine
set -euo pipefail

host=${DOCKER_HOST:-unix:///var/run/docker.sock}
directory=${ENGINE_DIR:-/var/lib/remote-executor-engine}
run_directory=/run/remote-executor-engine-$(cksum <<<"$directory" | cut -d ' ' -f 1)
pid_file=$run_directory/engine.pid
log=$directory/engine.log
start_timeout_s=60
stop_timeout_s=60

say() { printf '%s\n' "engine: $*"; }
fail() { say "$*" >&2; exit 1; }

answers() { DOCKER_HOST=$host timeout 20 docker version --format '{{.Server.Version}}' 2>/dev/null; }

# The process that was started here, if it lives: a process id alone may be another process's by now.
ours() {
    local pid
    pid=$(cat "$pid_file" 2>/dev/null) || return 1
    grep -qzxF -- "$directory" "/proc/$pid/cmdline" 2>/dev/null && echo "$pid"
}

start() {
    local version
    if version=$(answers); then
        say "version $version answers at $host already"
        return
    fi
    [[ $host == unix:///* ]] || fail "nothing answers at $host, and only one of this host can be started"
    ((EUID == 0)) || fail "nothing answers at $host, and starting an Engine takes root"
    command -v dockerd >/dev/null || fail "dockerd is not installed (Debian's package is docker.io)"
    mount_cgroups
    mkdir -p "$directory" "$run_directory"
    local options=(--data-root "$directory" --exec-root "$run_directory" --pidfile "$pid_file" --host "$host")
    if command -v crun >/dev/null; then
        options+=(--add-runtime "crun=$(command -v crun)")
    fi
    # In a session of its own, so that an interrupt of this script's terminal does not reach it.
    local command=(setsid dockerd)
    if [[ ${ENGINE_NETWORK:-} == none ]]; then
        # Without a bridge, dockerd removes any docker0, even another Engine's, so it must not see the host's.
        command=(setsid unshare --net dockerd)
    fi
    if [[ ${ENGINE_NETWORK:-} == none ]] || ! iptables --list --numeric >/dev/null 2>&1; then
        options+=(--bridge none --iptables=false)
    fi
    "${command[@]}" "${options[@]}" </dev/null >"$log" 2>&1 &
    wait_until_ready $!
}

# Where no init system has done it. A host with the second version of control groups has one file system for all.
mount_cgroups() {
    if ! compgen -G '/sys/fs/cgroup/*' >/dev/null && command -v cgroupfs-mount >/dev/null; then
        cgroupfs-mount
    fi
}

wait_until_ready() {
    local dockerd=$1 version deadline=$((SECONDS + start_timeout_s))
    until version=$(answers); do
        if ! kill -0 "$dockerd" 2>/dev/null || ((SECONDS > deadline)); then
            tail -n 20 "$log" >&2
            kill "$dockerd" 2>/dev/null || true
            fail "dockerd does not answer; its log is $log"
        fi
        sleep 0.2
    done
    say "version $version answers at $host; its log is $log"
}

stop() {
    local pid deadline=$((SECONDS + stop_timeout_s))
    pid=$(ours) || { say "none was started here"; return; }
    DOCKER_HOST=$host docker ps --quiet | xargs -r env DOCKER_HOST="$host" docker kill >/dev/null 2>&1 || true
    kill "$pid"
    while ours >/dev/null; do
        ((SECONDS <= deadline)) || fail "dockerd ($pid) does not stop; its log is $log"
        sleep 0.2
    done
    # A network namespace of its own stays mounted there.
    awk -v below="$run_directory/" 'index($2, below) == 1 { print $2 }' /proc/mounts | xargs -r umount
    rm -rf "$run_directory"
    say "stopped"
}

status() {
    local version
    version=$(answers) || fail "none answers at $host"
    say "version $version answers at $host$(ours >/dev/null && echo ', and was started here')"
}

case ${1:-} in
    start | stop | status) "$1" ;;
    *) fail "usage: tools/engine.sh start|stop|status" ;;
esac
