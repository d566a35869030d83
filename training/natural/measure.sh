#!/usr/bin/env bash
# Measure both models on held-out texts: every stage goes on where it was stopped. On a machine with NVIDIA GPUs, mlxkv and MLX for CUDA:
#
#   training/natural/measure.sh STAGE...       # one after the other, each on both models at once, a GPU each
#
#   main      KL of every preset after 4096 tokens     ask       256 questions at 8K
#   papers    variants that papers claim something of
#   short     KL after 1024 tokens                     long      after 7680
#   own       each method's own windows                plants    with outliers planted
#   select    settings of every method, chosen on texts of their own; then chosen: those on the test texts
#   fill      bits by direction                        frontier  pages, codes and nested codes
#
# MODELS: folders, by commas. HELD: folder of calibration, selection, test and haystack (empty: the texts that come with mlxkv). OUT: where rows are written, OUT/STAGE/MODEL.
# PROCESSES: at once on a GPU (4; with 14 on one GPU, MLX's memory failed). KV: other presets than the stage's. ARGS: more options for
# every command. GPUS: 2; with 1 the models take turns. MLXKV_KERNELS=0 is set: plain ops, the same codes, nothing to build.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
RUNS="${RUNS:-$here/runs/natural}" PYTHON="${PYTHON:-python3}" GPUS="${GPUS:-2}" PROCESSES="${PROCESSES:-4}"
MODELS="${MODELS:-$RUNS/natural-qwen/hub,$RUNS/natural-gemma/hub}" HELD="${HELD-$RUNS/held}" OUT="${OUT:-$RUNS/rows}"
export PYTHONPATH="$here" TOKENIZERS_PARALLELISM=false MLXKV_KERNELS="${MLXKV_KERNELS:-0}" OMP_NUM_THREADS=2
OURS=int8,int4,int3,int2,centred-int3,centred-int2
RIVALS=oscar-int4,oscar-int3,oscar-int2,kivi-int4,kivi-int2,kvarn-int4,kvarn-int3,kvarn-int2,turbo-int4,turbo-int3,turbo-int2
RIVALS+=,polar,polar-int3,polar-int2,hadamard-int4,hadamard-int3,hadamard-int2,srft-int4,srft-int3,srft-int2
RIVALS+=,srft-scaled-int4,srft-scaled-int2,saw-int4,kitty-int2,naive-int4,naive-int3,naive-int2
ASKED=int4,int3,int2,fill-2.25,fill-3,centred-int3,centred-int2,kivi-int4,kivi-int2,oscar-int2,kvarn-int2,turbo-int3,turbo-int2,hadamard-int2,naive-int4,naive-int2
WINDOWED=int2,oscar-int2,kivi-int2,kvarn-int2,polar-int2,turbo-int2
FILL=fill-1.6,fill-2.25,fill-3,fill-4
PAPERS=srft-int4+token,srft-int4+tensor,srft-int4+g16,srft-scaled-int4+g16,oscar-int2+layer,oscar-int2+centred,hadamard-int2+clip
PAPERS+=,turbo-2.5,turbo-3.5,turbo-int4+qjl,turbo-int3+qjl,polar-tree,polar-tree+online,polar-tree+plain,kvarn-int2+fixed
PAPERS+=,balanced-int2,balanced-k3v2,static-0.75+windows,oja-0.75,oja-0.75+int4
read -ra MORE <<< "${ARGS:-}"

run() { # MODULE MODEL STAGE ARGS...
  local module="$1" model="$2" out="$OUT/$3/$(name "$2")"; shift 3
  mkdir -p "$out"
  "$PYTHON" -m "experiments.$module" --models "$model" ${HELD:+--texts "$HELD"} --out "$out" "$@" "${MORE[@]}" >> "$out/output.txt" 2>&1
}
evidence() { run evidence.natural "$1" "$2" --dtype float16 --processes "$PROCESSES" "${@:3}"; }
name() { local path="${1%/hub}"; basename "$path"; }

stage() { # STAGE MODEL
  case "$1" in
    main) evidence "$2" main --kv "${KV:-$OURS,$FILL,$RIVALS}" --context 4096 --decode 512 --documents 0 ;;
    ask) evidence "$2" ask --kv "${KV:-$ASKED}" --context 4096 --decode 8 --documents 16 ;;
    papers) evidence "$2" papers --kv "${KV:-$PAPERS}" --context 4096 --decode 512 --documents 0 ;;
    short) evidence "$2" short --kv "${KV:-$ASKED}" --context 1024 --decode 512 --documents 0 ;;
    long) evidence "$2" long --kv "${KV:-$ASKED}" --context 7680 --decode 512 --documents 0 ;;
    own) evidence "$2" own --kv "${KV:-$WINDOWED}" --windows own --context 4096 --decode 512 --documents 0 ;;
    plants) for kind in reciprocal keys massive; do
        evidence "$2+$kind" plants --kv "${KV:-$ASKED}" --context 2048 --decode 256 --documents 0; done ;;
    select) run evidence.selection "$2" select --processes "$PROCESSES" --context 2048 --decode 256 --documents 0 ;;
    chosen) evidence "$2" chosen --kv int2 --chosen "$OUT/select/$(name "$2")/chosen.json" --context 4096 --decode 512 --documents 0 ;;
    fill) evidence "$2" fill --kv "${KV:-$FILL,fill-1.75,fill-2,fill-2.5,fill-3.25,int2,int3,centred-int2,oscar-int2}" --context 4096 --decode 512 --documents 0 ;;
    frontier) MLX_ENABLE_TF32=0 run frontier.every "$2" frontier --dtype float16 ;; # products of maps lose as much as int4 does in TF32
    *) echo "no such stage: $1" >&2; exit 2 ;;
  esac
}

[ $# -gt 0 ] || { sed -n '2,17p' "$0"; exit 2; }
IFS=, read -ra models <<< "$MODELS"
for each in "$@"; do
  begun=$SECONDS gpu=0 jobs=()
  for model in "${models[@]}"; do
    CUDA_VISIBLE_DEVICES="$gpu" stage "$each" "$model" & jobs+=($!)
    if [ "$GPUS" -lt 2 ]; then wait "${jobs[-1]}" || echo "$each failed on $model"; jobs=(); else gpu=$(((gpu + 1) % GPUS)); fi
  done
  for job in "${jobs[@]}"; do wait "$job" || echo "$each: a model failed; see output.txt"; done
  echo "$each: $((SECONDS - begun)) s"
done
