"""ExLlamaV3's own loader and generator, on one NVIDIA GPU."""

ENGINES["exllamav3"] = Engine(
    env="exllamav3",
    loads=("exl3",),
    devices=("cuda",),
    # measured with files of 4 MB to 3.6 GB, of which it holds little
    resources=RunResources(cpu=0, cuda=1600, start=4, block=0.0001, held=0),
)
