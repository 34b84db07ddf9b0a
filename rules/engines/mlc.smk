"""MLC's weights by our own kernels, through TVM."""

ENGINE_COSTS["mlc"] = EngineCosts(cpu=122, weights=0.57, floor=725, cuda=725, logits=16)
