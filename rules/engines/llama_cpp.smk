"""llama.cpp's library through its Python binding, and its server, compiled for this machine (rules/formats/gguf.smk)."""

KV = {"enum": ["f32", "f16", "bf16", "q8_0", "q4_0"]}
LLAMA = {
    "env": "llama_cpp",
    "loads": ("gguf",),
    "multi_gpu": True,
    "resources": RunResources(cpu=160, cuda=480, start=1, block=0.00003, logits=16),
}

ENGINES["llama_cpp"] = Engine(
    **LLAMA,
    options={
        "type_k": KV,
        "type_v": KV,
        "flash_attn": {"enum": ["auto", "on", "off"]},
        "n_batch": {"type": "integer", "minimum": 1},
        "n_ubatch": {"type": "integer", "minimum": 1},
    },
)
# options: whatever its command line takes
ENGINES["llama-server"] = Engine(**LLAMA, options=None, serves=True, slots="parallel")
