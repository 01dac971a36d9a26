#!/usr/bin/env bash
# The chain of the three stages on one machine: training starts when the first shard is committed.
# Set the variables here, or in the environment. With HIDDEN_STATES=colocated no server is started.
# Ends when all is done, or as soon as a stage fails, whose message says why.
set -euo pipefail
cd "$(dirname "$0")"
if [ $# -gt 0 ]; then
    echo "pipeline.sh: takes no arguments; set its variables in the environment:" >&2
    grep -E '^[A-Z_]+=' "$0" >&2
    exit 2
fi

INPUT=${INPUT:-s3://bucket/completions/}          # JSONL completions of the target
DATA=${DATA:-s3://bucket/tokens/}                 # tokenized shards
TARGET=${TARGET:-./Qwen3.6-27B}                   # the target's folder
RUN=${RUN:-runs/drafter}                          # checkpoints, metrics and the export
LISTEN=${LISTEN:-127.0.0.1:8815}                  # where stage 2 serves hidden states
HIDDEN_STATES=${HIDDEN_STATES:-$LISTEN}           # or colocated
TRAINERS=${TRAINERS:-1}                           # training processes, one a GPU
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
TOKENIZE_FLAGS=${TOKENIZE_FLAGS:-}
EXTRACT_FLAGS=${EXTRACT_FLAGS:-}
TRAIN_FLAGS=${TRAIN_FLAGS:-}

started=()
stop_all() {
    local own; own=$(ps -o args= -p $$ || true)
    for pid in "${started[@]}"; do
        # bash loses a signal that finds its child between fork and exec, still under bash's name
        while [ "$(ps -o args= -p "$pid")" = "${own:-none}" ]; do sleep 0.1; done
        kill "$pid" || true
    done 2> /dev/null
    wait || true
}
trap stop_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap '' HUP  # a dropped SSH connection ends nothing

if [ "$HIDDEN_STATES" != colocated ]; then
    "$PYTHON" extract_hidden_online.py --target "$TARGET" --listen "$LISTEN" $EXTRACT_FLAGS &
    started+=($!)
fi

"$PYTHON" tokenize_completions.py --input "$INPUT" --output "$DATA" --tokenizer "$TARGET" $TOKENIZE_FLAGS &
tokenizer=$!
started+=("$tokenizer")

if [ "$HIDDEN_STATES" != colocated ]; then
    until "$PYTHON" extract_hidden_online.py --ping "$LISTEN" $EXTRACT_FLAGS > /dev/null 2>&1; do
        for pid in "${started[@]}"; do kill -0 "$pid" 2> /dev/null || wait "$pid"; done
        sleep 1
    done
fi

# torchrun would handle SIGHUP by itself, and end the run with the SSH connection
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$TRAINERS" \
    --signals-to-handle SIGTERM,SIGINT --shutdown-timeout 1800 train_dflash_online.py --data "$DATA" --target "$TARGET" \
    --output "$RUN" --hidden-states "$HIDDEN_STATES" $TRAIN_FLAGS &
trainer=$!
started+=("$trainer")

wait -n "$tokenizer" "$trainer"  # a trainer that fails must not wait for hours of tokenizing
wait "$tokenizer"
wait "$trainer"
