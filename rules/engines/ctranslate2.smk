"""CTranslate2: on a CPU float16 is held as float32."""

ENGINE_COSTS["ctranslate2"] = EngineCosts(cpu=97, weights=4, quantized=1, floor=670, cuda=450, logits=16)
