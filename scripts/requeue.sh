# shellcheck shell=bash
# Sourced by batch scripts: a step that saves when Slurm is about to end its job, and the job back in the queue after that.
# docs/guide/clusters.md says what Slurm does when.

# save_and_requeue SAVE SRUN_ARGUMENTS...
#
# Runs srun; tells all processes of the step by SIGUSR1 to save when this shell gets SIGUSR1 or SIGTERM. Where they leave
# SAVE/requeue, the job is put back into the queue; exit codes say nothing, torchrun turns them all into 1.
save_and_requeue() {
    local save=$1 step="" teller="" again=yes code job state
    shift
    # A task's own number is the whole array's, if it is the last one of it.
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    job=${job:-$SLURM_JOB_ID}
    rm -f "$save/requeue" # an old request; a run that cannot start must not be started for ever

    on_signal() {
        again=yes
        echo "$(date +%FT%T) $1: asking for a checkpoint"
        # Again and again: who is just starting does not listen yet, and being told twice does no harm. A process group of
        # its own: scancel itself tries for minutes where a job is ending, and must not tell the one that starts again.
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
    trap 'on_signal SIGUSR1' USR1 # --signal: the time is nearly up
    trap 'on_signal SIGTERM' TERM # preemption, scancel

    # One task a node; since Slurm 22.05 it has one core unless srun is told.
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}
    # bash runs a trap only between commands, and `wait` is the one command that a signal ends early.
    srun --kill-on-bad-exit=1 "$@" &
    step=$!
    while [ -n "$again" ]; do
        again=""
        wait "$step"
        code=$?
    done
    if [ -n "$teller" ]; then kill -- -"$teller" 2>/dev/null; fi
    [ -e "$save/requeue" ] || return "$code"

    # One that Slurm is ending is cancelled, and stays so, or Slurm requeues it. One that still runs was told that its
    # time is nearly up, or is preempted with a time of grace: Slurm would count it as completed.
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
