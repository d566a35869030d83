#!/usr/bin/env bash
# Prepare, train, watch and pack both models on a machine with two GPUs. From anywhere:
#
#   training/natural/run.sh prepare            # once: train.xz -> tokens, on all cores
#   training/natural/run.sh smoke [MODEL...]   # a minute or two a model: attention, speed, memory
#   training/natural/run.sh train              # both in the background, a GPU each; returns at once
#   training/natural/run.sh status | wait [SECONDS] | stop
#   training/natural/run.sh check              # needles and losses of both
#   training/natural/run.sh pack               # 8-bit parts of at most 15.5 MiB in RUNS/packed
#   training/natural/run.sh parts N            # copies the N-th four of the parts to $OUT
#
# SOURCE: folder with train.xz, tokenizer/, held/. RUNS: where everything is written. MINUTES: 12.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export PYTHONPATH="$here:$here/training" TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
SOURCE="${SOURCE:-$here/runs/natural}" RUNS="${RUNS:-$SOURCE}" PYTHON="${PYTHON:-python3}"
MODELS=(natural-qwen natural-gemma)
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
mkdir -p "$RUNS"
RUNS="$(cd "$RUNS" && pwd)"

one() { # MODEL GPU ARGS...: trains, and resumes up to three times where the process fails
  local model="$1" gpu="$2"; shift 2
  export CUDA_VISIBLE_DEVICES="$gpu"
  for _ in 1 2 3 4; do
    "$PYTHON" -m natural.train "$model" --data "$RUNS/data" --held "$SOURCE" --out "$RUNS/$model" \
      --minutes "${MINUTES:-12}" --resume "$@" && return 0
    echo "the process failed; resuming with the plainest attention"
    set -- "$@" --attention flash --sliding blocks
    sleep 2
  done
  return 1
}

case "${1:-}" in
  prepare) "$PYTHON" -m natural.prepare "$SOURCE" "$RUNS/data" ;;
  smoke)
    shift
    [ $# -gt 0 ] || set -- "${MODELS[@]}"
    for model in "$@"; do
      "$PYTHON" -m natural.train "$model" --data "$RUNS/data" --held "$SOURCE" --out "$RUNS/smoke/$model" --smoke
    done ;;
  one) shift; one "$@" ;;
  train)
    shift
    gpu=0
    for model in "${MODELS[@]}"; do
      mkdir -p "$RUNS/$model"
      rm -f "$RUNS/$model/done"
      SOURCE="$SOURCE" RUNS="$RUNS" setsid nohup bash "$here/training/natural/run.sh" one "$model" "$gpu" "$@" \
        > "$RUNS/$model/output.txt" 2>&1 < /dev/null &
      echo "$!" > "$RUNS/$model/pid"
      echo "$model: GPU $gpu, process group $!, output in $RUNS/$model/output.txt"
      gpu=$((gpu + 1))
    done ;;
  stop) for model in "${MODELS[@]}"; do kill -- "-$(cat "$RUNS/$model/pid")" || true; done ;;
  status) "$PYTHON" -m natural.status "$RUNS" ;;
  wait) "$PYTHON" -m natural.status "$RUNS" --wait "${2:-300}" ;;
  check)
    gpu=0
    for model in "${MODELS[@]}"; do
      CUDA_VISIBLE_DEVICES="$gpu" "$PYTHON" -m natural.check "$RUNS/$model/hub" "$SOURCE" > "$RUNS/$model/check.txt" 2>&1 &
      gpu=$((gpu + 1))
    done
    wait
    for model in "${MODELS[@]}"; do echo "$model"; cat "$RUNS/$model/check.txt"; done ;;
  pack)
    for model in "${MODELS[@]}"; do "$PYTHON" -m natural.pack "$RUNS/$model/hub" "$RUNS/packed" & done
    wait
    ls -l "$RUNS/packed" ;;
  parts)
    find "$RUNS/packed" -name '*.part*' | sort | tail -n +$((4 * ${2:?which four, from 1 on} - 3)) | head -n 4 \
      | xargs -I{} cp {} "${OUT:?the folder to copy to}" ;;
  *) sed -n '2,14p' "$0"; exit 2 ;;
esac
