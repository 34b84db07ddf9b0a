"""transformers, by which the quality gate also runs each model's source."""

ENGINE_COSTS["transformers"] = EngineCosts(cpu=420, weights=4, floor=1845, cuda=1100, mapped=True)
