"""ExLlamaV3's own loader and generator, on one NVIDIA GPU."""

ENGINES["exllamav3"] = Engine(env="exllamav3", loads=("exl3",), devices=("cuda",))
