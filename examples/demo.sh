#!/usr/bin/env bash
# The demo: generated word problems, a base model by supervised training, then reinforcement learning on its answers.
#   examples/demo.sh TANDEM [SEED]     TANDEM: the built program. SEED (default 1): weights, data order and sampling.
# Everything goes to runs/. A demo that was interrupted goes on where it stopped; one that has finished is only reported again.
set -euo pipefail
tandem=$(realpath "$1")
seed=${2:-1}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

suffix=$([[ $seed == 1 ]] && echo "" || echo "-$seed")
base=demo-base$suffix
run=demo$suffix

# train KIND NAME CONFIG [FLAGS...]: starts the run, or resumes it when its folder is there.
train() {
  local kind=$1 name=$2 config=$3
  shift 3
  local -a resume=()
  if [[ -e runs/$name/config.toml ]]; then resume=(--resume); fi
  "$tandem" "$kind" "$config" "${resume[@]}" --set run.name="$name" --set train.seed="$seed" "$@"
}

if [[ ! -e runs/demo-data/tokenizer.json ]]; then "$tandem" demo-data runs/demo-data; fi
train sft "$base" examples/demo_sft.toml
train rl "$run" examples/demo.toml --set model.load="runs/$base/model" --set data.rollout_seed="$seed"
