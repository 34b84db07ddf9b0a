"""ExLlamaV3's own loader and generator, on one NVIDIA GPU."""

ENGINES["exllamav3"] = Engine(
    env="exllamav3",
    loads=("exl3",),
    devices=("cuda",),
    # measured with files of 4 MB to 3.6 GB, of which it holds little; transformers is slower
    resources=RunResources(cpu=0, weights=0, floor=1600, cuda=0, mapped=True, like="transformers"),
)
