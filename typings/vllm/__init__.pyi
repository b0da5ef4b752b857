# What the bridge uses of vLLM 0.32 and 0.33, so that it type-checks without them.
