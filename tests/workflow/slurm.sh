#!/usr/bin/env bash
# A Slurm of two nodes on this machine, for tests: tests/workflow/slurm.sh start|stop DIR
#
# Node cpu1 is in the partition cpu; node gpu1, with two GPUs that are links to /dev/null, is in the partition gpu.
# Everything that runs keeps its files in DIR; only /etc/slurm, where Slurm's own commands look, is replaced: what was
# there waits in /etc/slurm.before-test and is put back by stop, by a start that fails, and by the next start after
# neither could.
set -euo pipefail

etc=/etc/slurm
before=/etc/slurm.before-test

fail() {
    echo "error: $1" >&2
    exit 1
}

# Whether a process is that daemon: a pid file may be old, and a dead process has no command any more.
ours() { # PID NAME
    tr '\0' ' ' <"/proc/$1/cmdline" 2>/dev/null | grep -q "^$2 "
}

running() { # DIR
    local pid
    pid=$(cat "$1/slurmctld.pid" 2>/dev/null) && ours "$pid" slurmctld
}

stop() { # DIR
    local name pid
    if running "$1"; then # a job outlives slurmd
        timeout 10 scancel --user "$(id -un)" 2>/dev/null || true
        for _ in $(seq 50); do
            [ -n "$(timeout 10 squeue --noheader --states=running,completing 2>/dev/null)" ] || break
            sleep 0.1
        done
    fi
    for name in slurmd-gpu1 slurmd-cpu1 slurmctld munged; do
        pid=$(cat "$1/$name.pid" 2>/dev/null) || continue
        ours "$pid" "${name%-*}" || continue
        kill "$pid" 2>/dev/null || true
        for _ in $(seq 50); do
            ours "$pid" "${name%-*}" || continue 2
            sleep 0.1
        done
        kill -9 "$pid"
    done
    if [ -d "$before" ]; then
        rm -rf "$etc"
        if [ -e "$before/.absent" ]; then rm -r "$before"; else mv "$before" "$etc"; fi
    fi
}

give_up() { # DIR
    echo "error: Slurm did not start ($1 has its logs): $(tail -n 1 "$1/start.log")" >&2
    stop "$1"
}

launch() { # COMMAND: its output to a file, since who waits for the end of ours must not wait for a daemon's
    "$@" >>"$dir/start.log" 2>&1 </dev/null
}

start() { # DIR
    local dir=$1 program other
    [ "$(id -u)" = 0 ] || fail "only root can put a slurm.conf into $etc"
    for program in slurmctld slurmd munged mungekey; do
        command -v "$program" >/dev/null || fail "$program is not installed: apt-get install slurm-wlm munge"
    done
    if [ -d "$before" ]; then
        other=$(cat "$etc/test-directory" 2>/dev/null || echo "$dir")
        ! running "$other" || fail "another test's Slurm is running; tests/workflow/slurm.sh stop $other ends it"
        stop "$other"
    fi
    [ -e "$etc/slurm.conf" ] && fail "$etc/slurm.conf: this machine belongs to a cluster, which a test does not touch"

    mkdir -p "$dir/state" "$dir/spool-cpu1" "$dir/spool-gpu1"
    trap "give_up '$dir'" EXIT
    if [ -d "$etc" ]; then mv "$etc" "$before"; else mkdir "$before" && touch "$before/.absent"; fi
    mkdir "$etc"
    echo "$dir" >"$etc/test-directory"
    ln -sf /dev/null "$dir/gpu0"
    ln -sf /dev/null "$dir/gpu1"
    echo "NodeName=gpu1 Name=gpu File=$dir/gpu[0-1]" >"$etc/gres.conf"
    # config_overrides: the nodes have what stands here, whatever this machine has, so that a profile's requests fit.
    # OverMemoryKill: without cgroups the accounting plugin sees, once a second, that a job holds more than it asked for.
    # UsePss: it counts a page once, as cgroups do, also while one process starts another (docs/FOOTGUNS.md).
    # cred_expire: a job of a node that failed is started again so many seconds later (by default 120).
    cat >"$etc/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=2
MinJobAge=86400
SchedulerParameters=sched_interval=2,sched_min_interval=0
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill,UsePss
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
NodeName=DEFAULT CPUs=16 RealMemory=512000
NodeName=cpu1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=16818
NodeName=gpu1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=16819 Gres=gpu:2
PartitionName=cpu Nodes=cpu1 Default=YES MaxTime=1-0 State=UP
PartitionName=gpu Nodes=gpu1 MaxTime=1-0 State=UP
CONF

    rm -f "$dir/munge.key" "$dir/start.log"
    mungekey --create --keyfile "$dir/munge.key"
    launch munged --force --socket "$dir/munge.socket" --key-file "$dir/munge.key" --pid-file "$dir/munged.pid" \
        --log-file "$dir/munged.log" --seed-file "$dir/munged.seed"
    launch slurmctld -c -f "$etc/slurm.conf"
    launch slurmd -N cpu1 -f "$etc/slurm.conf"
    launch slurmd -N gpu1 -f "$etc/slurm.conf"
    for _ in $(seq 400); do
        if [ "$(sinfo --noheader --format=%T 2>/dev/null | sort -u)" = idle ]; then
            trap - EXIT
            return
        fi
        sleep 0.1
    done
    echo "its nodes were not idle within 40 seconds" >>"$dir/start.log"
    exit 1
}

case "${1-}:${2-}" in
    start:/*) start "$2" ;;
    stop:/*) stop "$2" ;;
    *) fail "usage: tests/workflow/slurm.sh start|stop DIR, with an absolute path" ;;
esac
