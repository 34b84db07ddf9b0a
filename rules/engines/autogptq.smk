"""auto-gptq: nothing was recorded, and it takes about as long as gptqmodel."""

ENGINE_COSTS["autogptq"] = EngineCosts(cpu=715, weights=2, floor=1940, cuda=1510, mapped=True, like="gptqmodel")
