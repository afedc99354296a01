# shellcheck shell=bash
# Sourced by batch scripts: runs a job step that saves before Slurm ends the job, and requeues the job.
# docs/guide/clusters.md describes when Slurm sends which signal.

if [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "${0##*/}: error: a batch script runs as a job of Slurm: submit it with sbatch;" \
        "without Slurm, start torchrun pretrain_gpt.py" >&2
    return 2
fi

# save_and_requeue SAVE SRUN_ARGUMENTS...
#
# Runs srun. When this shell gets SIGUSR1 or SIGTERM, all processes of the step get SIGUSR1 and save. If they write
# SAVE/requeue, the job is requeued. Exit codes cannot tell, because torchrun turns all of them into 1.
save_and_requeue() {
    local save=$1 step="" teller="" asked="" again=yes code job state
    shift
    # SLURM_JOB_ID of an array's last task is the ID of the whole array.
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    job=${job:-$SLURM_JOB_ID}
    rm -f "$save/requeue" # an old request: a run that cannot start must not be requeued forever

    on_signal() {
        again=yes asked=yes
        echo "$(date +%FT%T) $1: asking for a checkpoint"
        tell_step
    }
    tell_step() {
        # Repeated, because a process that is just starting has no handler yet, and a second signal does no harm. In its
        # own process group: scancel retries for minutes while a job ends, and must not signal the requeued one.
        if [ -n "$step" ] && [ -z "$teller" ]; then
            set -m
            while kill -0 "$step" 2>/dev/null; do
                scancel --signal=USR1 "$job" 2>/dev/null
                sleep 10
            done &
            teller=$!
            set +m
        fi
    }
    trap 'on_signal SIGUSR1' USR1 # --signal: the time limit is near
    trap 'on_signal SIGTERM' TERM # preemption, scancel

    # One task per node. Since Slurm 22.05, it gets one core unless srun is told otherwise.
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}
    # bash runs a trap only between commands, and `wait` is the only command that a signal interrupts.
    srun --kill-on-bad-exit=1 "$@" &
    step=$!
    if [ -n "$asked" ]; then tell_step; fi # a signal came before the line above
    while [ -n "$again" ]; do
        again=""
        wait "$step"
        code=$?
    done
    if [ -n "$teller" ]; then kill -- -"$teller" 2>/dev/null; fi
    [ -e "$save/requeue" ] || return "$code"

    # A job that Slurm is ending stays cancelled, or Slurm requeues it. A job that still runs is near its time limit, or is
    # preempted with a grace period: without a requeue, Slurm would count it as completed.
    state=$(scontrol --oneliner show job "$job" 2>/dev/null | grep -o 'JobState=[A-Z]*')
    case "$state" in
        JobState=COMPLETING | JobState=CANCELLED | JobState=PREEMPTED | JobState=TIMEOUT)
            echo "$(date +%FT%T) interrupted ($(cat "$save/requeue")), and Slurm ends this job ($state)"
            return 1
            ;;
    esac
    echo "$(date +%FT%T) interrupted ($(cat "$save/requeue")): back into the queue"
    scontrol requeue "$job" && return 0
    echo "scontrol could not requeue job $job; submit it again to go on" >&2
    return 1
}
