"""What GPTQ and AWQ share: which layers they quantize, what they calibrate on, and how their result is published."""
