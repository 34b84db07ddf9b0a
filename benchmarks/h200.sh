#!/usr/bin/env bash
# Measure benchmarks/h200.yaml on one GPU for each size: formats at the shapes of 7B and of 1.1B by vLLM, offline and
# served, by the libraries that quantize, and by Quantmill's own kernels. The most telling rows come first, so that a run
# that ends early has them.
#
#   benchmarks/h200.sh pack FOLDER
#   CUDA_VISIBLE_DEVICES=0 benchmarks/h200.sh 7b FOLDER CORES &
#   CUDA_VISIBLE_DEVICES=1 benchmarks/h200.sh 1.1b FOLDER CORES
#
# FOLDER gets 100 GB. /tmp/vllm-python runs vLLM (its bundle: make bundle ENV=vllm), and python3 Snakemake, TVM and the
# libraries. FOLDER/SIZE/hands/*.json are rows beside the same libraries used by hand (benchmarks/by_hand.py).
set -uo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
usage="usage: h200.sh pack FOLDER, or h200.sh 7b|1.1b FOLDER CORES"
size=${1:?$usage} folder=${2:?$usage}
case $size in
    pack) ;;
    7b | 1.1b) cores=${3:?$usage} ;;
    *) echo "$usage" >&2 && exit 2 ;;
esac
mkdir -p "$folder/random" && cd "$folder" || exit

if [ "$size" = pack ]; then
    for shape in 7b:llama-2-7b 1.1b:llama-1.1b; do
        config=$repository/config/examples/${shape#*:}.json to=random/${shape%:*}
        printf '%s\0' --format=gptq --repeat=8 "$config" "$to-gptq-repeats"
        for format in gptq awq ct-w4a16 ct-w8a8 ct-fp8 ct-nvfp4a16 ct-nvfp4 ct-mxfp4 exl3; do
            printf '%s\0' --format=$format --repeat=0 "$config" "$to-$format"
        done
    done | xargs -0 -P 6 -n 4 python3 "$repository/benchmarks/random_packed.py"
    exit
fi
mkdir -p "$size/hands" && cd "$size" && ln -sfn ../random random || exit
model=llama-$size
speed=artifacts/$model/latency load=artifacts/$model/serving

make_all() { # make_all TARGET…
    python3 -P -m snakemake --snakefile "$repository/Snakefile" --directory . --cores "$cores" --resources gpu=1 hub=1 \
        --keep-going --rerun-incomplete --rerun-triggers mtime --quiet all --configfile study.yaml -- "$@"
}

measure_by_hand() { # measure_by_hand TABLE ROW.json…: beside the same library without Quantmill
    python3 "$repository/benchmarks/by_hand.py" "hands/$1.json" "${@:2}" --rounds 2 --python torch=python3 \
        --python quantizers=python3 --python exllamav3=python3 --python vllm=/tmp/vllm-python >>hands/log 2>&1
}

ln -sfn "$repository/config" config && cp "$repository/benchmarks/h200.yaml" study.yaml || exit
if [ "$size" = 7b ]; then
    make_all $speed/{fp8-random,w8a8-random,w4a16-random}@vllm.json $speed/gptq-random@vllm-marlin.json
    make_all $load/{fp16,gptq-random}@vllm-serve.json
    make_all $speed/{fp16,mlc-q4f16_1}.json
    make_all $speed/gptq-repeats@vllm-{serve,ngram,draft}.json
    measure_by_hand first $speed/gptq-random@vllm-marlin.json
    make_all $speed/{exl3-random,bnb-nf4,torchao-int8}.json
    make_all $load/fp8-random@vllm-serve.json
    make_all $speed/{nvfp4a16-random,nvfp4-random,bnb-nf4}@vllm.json $speed/mxfp4-random@vllm-bfloat16.json
    make_all $speed/awq-random@vllm-marlin.json
    measure_by_hand second $speed/{fp8-random@vllm,exl3-random,bnb-nf4,torchao-int8}.json
    make_all $speed/{gptq,awq}-random@vllm.json $speed/{bnb-fp4,torchao-fp8}.json
    make_all $speed/{bnb-int8,hqq-int4}.json # some five and eight minutes: about 18 and 10 tokens/s
else
    make_all $speed/{fp16,gptq-random,fp8-random,w8a8-random,w4a16-random,nvfp4a16-random}@vllm.json
    make_all $speed/{exl3-random,bnb-nf4,hqq-int4,torchao-int8,bnb-fp4,torchao-fp8}.json
    make_all $load/{fp16,gptq-random}@vllm-serve.json
    make_all $speed/{nvfp4-random,bnb-nf4,bnb-int8,awq-random}@vllm.json $speed/mxfp4-random@vllm-bfloat16.json
    measure_by_hand first $speed/{exl3-random,bnb-nf4,torchao-int8,nvfp4-random@vllm}.json
    make_all $speed/bnb-int8.json
fi
