"""gptqmodel, which runs GPTQ's and AWQ's folders."""

ENGINE_COSTS["gptqmodel"] = EngineCosts(cpu=715, weights=2, floor=2020, cuda=1590, mapped=True)
