#!/usr/bin/env bash
# Measure benchmarks/h200.yaml on one GPU: formats at the shapes of 7B and 1.1B by vLLM, offline and served, and by the
# libraries that quantize. The most telling rows come first, so that a run that ends early has them.
#
#   benchmarks/h200.sh FOLDER [HANDS]
#
# FOLDER gets artifacts and results; 60 GB of disk. /tmp/vllm-python runs vLLM (its bundle: make bundle ENV=vllm), and
# python3 Snakemake and the libraries. HANDS gets what vLLM's own benchmark says of two artifacts.
set -uo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1" && cd "$1" || exit
hands=${2:-$PWD/hands}
mkdir -p "$hands"

make_all() { # make_all TARGET…
    python3 -m snakemake --snakefile "$repository/Snakefile" --directory . --cores all --resources gpu=1 hub=1 \
        --keep-going --rerun-incomplete --rerun-triggers mtime --quiet all \
        --set-threads latency=14 serving=14 --configfile study.yaml -- "$@"
}

by_hand() { # by_hand ARTIFACT
    /tmp/vllm-python -m vllm.entrypoints.cli.main bench latency --model "artifacts/llama-7b/$1" --input-len 23 \
        --output-len 200 --batch-size 1 --num-iters-warmup 2 --num-iters 8 --disable-detokenize \
        --no-enable-prefix-caching --output-json "$hands/$1.json" >"$hands/$1.log" 2>&1
}

sed "s#config/examples/#$repository/config/examples/#" "$repository/benchmarks/h200.yaml" >study.yaml
mkdir -p random
for size in 7b:llama-2-7b 1.1b:llama-1.1b; do
    shape=$repository/config/examples/${size#*:}.json
    for format in gptq awq ct-w4a16 ct-w8a8 ct-fp8 ct-nvfp4a16 ct-nvfp4 ct-mxfp4; do
        echo "$shape random/${size%:*}-$format --format $format"
    done
    echo "$shape random/${size%:*}-gptq-repeats --format gptq --repeat 8"
done | xargs -P 6 -L 1 python3 "$repository/benchmarks/random_packed.py"

speed=artifacts/llama-7b/latency load=artifacts/llama-7b/serving small=artifacts/llama-1.1b
make_all $speed/{fp16,gptq-random,awq-random,fp8-random}@vllm.json $speed/{gptq,awq}-random@vllm-marlin.json
by_hand gptq-random
by_hand fp8-random
make_all $load/fp16@vllm-serve.json
make_all $speed/{w4a16-random,w8a8-random,nvfp4a16-random,bnb-nf4}@vllm.json
make_all $speed/gptq-repeats@vllm-{serve,ngram,draft}.json
make_all $speed/{bnb-nf4,hqq-int4,torchao-int8,bnb-int8}.json
make_all $small/serving/fp16@vllm-serve.json $load/fp8-random@vllm-serve.json
make_all $small/latency/{fp16,gptq-random,fp8-random,w8a8-random,w4a16-random,nvfp4a16-random,nvfp4-random,mxfp4-random}@vllm.json
make_all $small/latency/{bnb-nf4,bnb-fp4,bnb-int8,hqq-int4,torchao-int8,torchao-fp8}.json
